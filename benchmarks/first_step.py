"""What the first training step costs in a fresh process: the library's own, ours with a warm cache and with a cold one.

    python -m benchmarks.first_step [--backend hopper] [--repeats 3] [--save]

Each figure is the whole life of a Python process, from its start to the end of the first step on the device, with all
imports; the difference to the unpatched arm is what fusepatch adds. Cold: an empty FUSEPATCH_CACHE_DIR and an empty
Triton cache, so kernels are compiled and self-checked. Warm: what the cold process left behind. The promises are at
most 2 s more when warm and at most 30 s more when cold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import RESULTS, Figure, append, summary
from fusepatch import table

ARMS = ("eager", "fusepatch_cold", "fusepatch_warm")
TOKENS, HIDDEN, INNER = 8192, 2048, 8192
LIMIT_S = 300.0

STEP = """
import sys
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

device, tokens, hidden, inner = sys.argv[1], *map(int, sys.argv[2:5])
if sys.argv[5] != "eager":
    import fusepatch
    fusepatch.accelerate("gated_mlp")
with torch.device(device):
    mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner)).bfloat16()
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
mlp(x).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
print(0 if sys.argv[5] == "eager" else fusepatch.status().native_calls(), "cutlass" in sys.modules)
"""


def _run(arm: str, device: str, sizes: tuple[int, int, int], backend: str, cache: Path) -> tuple[float, str]:
    """Seconds, and what the process said: its native calls, and whether it imported the CuTe DSL."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("FUSEPATCH")}
    environ |= {
        "FUSEPATCH_CACHE_DIR": str(cache / "fusepatch"),
        "FUSEPATCH_GATED_MLP_BACKEND": backend,
        "FUSEPATCH_LOG": "warning",
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", STEP, device, *map(str, sizes), arm],
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode or (arm != "eager" and done.stdout.startswith("0 ")):
        raise SystemExit(f"{arm} ran nothing natively, or failed:\n{done.stdout}{done.stderr}")
    return seconds, done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", help="(default: %(default)s; on a CPU: reference)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each arm (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/results/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to append to with --save")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if options.save and not on_gpu and options.results.resolve() == RESULTS.resolve():
        parser.error("without a GPU this is a rehearsal: give --results another folder")
    device, backend = ("cuda", options.backend) if on_gpu else ("cpu", "reference")
    sizes = (TOKENS, HIDDEN, INNER) if on_gpu else (64, 256, 512)
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    said: dict[str, str] = {}
    _run("eager", device, sizes, backend, Path(tempfile.gettempdir()))  # files are read from disk once
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for arm in ARMS:
                seconds, said[arm] = _run(arm, device, sizes, backend, Path(cache))
                samples[arm].append(seconds)
    case = f"M{sizes[0]}_H{sizes[1]}_I{sizes[2]}_{backend}"
    figures = [
        Figure("first_step", case, "train", arm, "time", "s", *summary(found), len(found))
        for arm, found in samples.items()
    ]
    if options.save:
        for path in append(figures, options.results, dry_run=not on_gpu):
            print(f"appended to {path}")
    rows = [
        (f.arm, f"{f.p50:.2f}", f"{f.p50 - figures[0].p50:+.2f}", f"{f.p20:.2f} to {f.p80:.2f}", said[f.arm])
        for f in figures
    ]
    print(table.render(("arm", "seconds", "over eager", "p20 to p80", "native calls, DSL imported"), rows))


if __name__ == "__main__":
    main()
