"""Launches kernels from disk under the CUDA runtime of fake_cuda.c, which this process has preloaded.

`python fake_cuda_child.py RUNTIME`: pickled entries (`fake_cuda.Entry`) come on stdin, and what each of their calls
launched goes to stdout. The DSL must not be needed for that.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import fake_cuda

from fusepatch.kernels.cute import artefacts


def _launched(entry: fake_cuda.Entry, runtime: Path) -> list[fake_cuda.Launched]:
    launch = artefacts.load(entry.path, entry.key)
    assert launch is not None, f"not loaded: {entry.path}"
    seen = fake_cuda.watch(runtime, entry.sizes)
    found = []
    for number, call in enumerate(entry.calls):
        before = seen().count
        launch(*(_argument(each, entry.dtype) for each in call))
        assert seen().count == before + 1, f"call {number} launched nothing under {runtime}"
        found.append(seen())
    return found


def _argument(given: fake_cuda.Operand | int | None, dtype: str) -> object:
    if isinstance(given, fake_cuda.Operand):
        return fake_cuda.tensor(given.address, given.shape, dtype, given.pitch)
    return given


if __name__ == "__main__":
    entries: list[fake_cuda.Entry] = pickle.load(sys.stdin.buffer)
    results = [_launched(entry, Path(sys.argv[1])) for entry in entries]
    assert "cutlass" not in sys.modules, "the DSL was imported"
    sys.stdout.buffer.write(pickle.dumps(results))
