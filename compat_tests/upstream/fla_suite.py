"""Runs flash-linear-attention's own tests as they are and accelerated, and compares how each of them ends.

    PYTHONPATH=accelerate:compat_tests python -m upstream.fla_suite FOLDER [FILE ...] [--require-native] [--workers N]

FOLDER holds FLA's `tests/`, which are on GitHub only (github.com/fla-org/flash-linear-attention) and need a GPU. The
backends are those of the environment (FUSEPATCH_GATED_MLP_BACKEND; FUSEPATCH_KDA=1 with FUSEPATCH_KDA_BACKEND). Exits
with 1 where a test ends differently, where none passed, and, with --require-native, where no call ran natively.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from upstream import suite

FILES = (
    "tests/modules/test_activation.py",  # uses nothing of ours, and must not notice us
    "tests/models/test_modeling_transformer.py",  # skipped without flash-attn
    "tests/models/test_modeling_gated_deltanet.py",
    "tests/models/test_modeling_deltanet.py",
    "tests/models/test_modeling_gla.py",
    "tests/models/test_modeling_gsa.py",
    "tests/models/test_modeling_hgrn2.py",
    "tests/models/test_modeling_kda.py",
    "tests/models/test_modeling_retnet.py",
    "tests/models/test_modeling_forgetting_transformer.py",
    "tests/layers/test_gated_deltanet.py",
    "tests/ops/test_kda.py",
    "tests/ops/test_gdn.py",
)
"""Models whose layers hold a GatedMLP, of several kinds of attention (`tests/models/test_modeling_*.py` is all of
them), and the linear-attention ops that we have backends for."""


def compare(folder: Path, files: Sequence[str], *, require_native: bool, workers: int) -> int:
    """Runs both, prints what was found, and gives the exit status."""
    # One test that hangs is one outcome, and not the end of the whole.
    options = ("--timeout", "240", "-p", "upstream.untuned", *(("-n", str(workers)) if workers else ()), *files)
    # Both at once: compiling FLA's kernels, on the CPU, is what takes the time.
    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(
            lambda arm: _run(arm[0], folder, *arm[1], *options), (("unpatched", ()), ("patched", suite.ACCELERATED))
        )
    found = suite.differences(stock, patched)
    print(f"{len(found)} tests end differently" if found else "every test ends the same", *found, sep="\n  ")
    faults = [name for name, run in (("unpatched", stock), ("patched", patched)) if not run.is_whole()]
    if faults:
        print(f"no result: pytest did not come to its end, or ran nothing ({', '.join(faults)})")
    elif "passed" not in stock.outcomes.values():
        faults.append("nothing passed")
        print("no result: no test passes unpatched, so nothing was compared")
    if require_native and not patched.native:
        faults.append("no native call")
        print("no call ran natively")
    return 1 if found or faults else 0


def _run(name: str, folder: Path, *arguments: str) -> suite.Run:
    started = time.monotonic()
    found = suite.run(folder, *arguments)
    if not found.is_whole():
        print(found.output)
    # The plugin's line says by which routes, and why not by ours.
    said = [line for line in found.output.splitlines() if line.startswith(("fusepatch: ", "FAILED ", "ERROR "))]
    print(f"{name}: {found.count()}, {found.native} native calls, in {time.monotonic() - started:.0f} s")
    print(*(f"  {line}" for line in said), sep="\n", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m upstream.fla_suite", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="the folder that holds FLA's tests/")
    parser.add_argument(
        "files", nargs="*", default=FILES, help="files of it, or file::test, as tests/ops/test_kda.py::test_chunk"
    )
    parser.add_argument("--require-native", action="store_true", help="exit with 1 where no call ran natively")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest-xdist, which share the GPU")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    files = [name for name in given.files if (folder / name.split("::")[0]).exists()]
    for name in given.files:
        if name not in files:
            print(f"not there: {name}")
    if not files:
        parser.error(f"{folder} holds none of these files")
    return compare(folder, files, require_native=given.require_native, workers=given.workers)


if __name__ == "__main__":
    sys.exit(main())
