"""The activations of kernels/cute/activations.py alone, as a kernel: what both GPUs' epilogues compute."""

# No `from __future__ import annotations`: the DSL reads annotations.

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from fusepatch.kernels.cute import gemm
from fusepatch.kernels.cute.activations import activate, activate_and_slope

THREADS = 128
ROWS = ("activate", "value", "slope")
"""Of the results: what `activate` gives, and both results of `activate_and_slope`."""


def build(activation: str, options: str) -> Any:
    """The result takes (values [N], results [3, N], -log2(e)), all in fp32, with N in 128ths."""
    count = cute.sym_int(divisibility=THREADS)
    values = cute.runtime.make_fake_tensor(Float32, (count,), stride=(1,), assumed_align=4)
    stride = (cute.sym_int64(divisibility=1), 1)
    results = cute.runtime.make_fake_tensor(Float32, (len(ROWS), count), stride=stride, assumed_align=4)

    @cute.kernel
    def kernel(values: cute.Tensor, results: cute.Tensor, minus_log2e: Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = block * THREADS + thread
        gate = values[at]
        value, slope = activate_and_slope(gate, minus_log2e, activation)
        results[0, at] = activate(gate, minus_log2e, activation)
        results[1, at] = value
        results[2, at] = slope

    @cute.jit
    def run(values: cute.Tensor, results: cute.Tensor, minus_log2e: Float32, stream: Any) -> None:
        blocks = cute.size(values) // THREADS
        kernel(values, results, minus_log2e).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    return cute.compile(run, values, results, Float32(0.0), gemm.fake_stream(), options=options)
