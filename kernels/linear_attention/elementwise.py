# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What the Triton kernels around the recurrences share: the functions of single numbers, and how a kernel is launched.

softplus(x) = log(1 + exp(x))        sigmoid(x) = 1 / (1 + exp(-x))        in fp32, to full relative accuracy
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..device import made_current

L2_EPS = tl.constexpr(1e-6)  # reference.L2_EPS; a kernel reads no other kind of global


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to full relative accuracy at either end: where 1 + u rounds, log(1 + u) / (1 + u - 1) makes
    up for it."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    tail = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 0, x, 0.0) + tail


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), which no x makes overflow."""
    u = tl.exp(-tl.abs(x))
    return tl.where(x < 0, u, 1.0) / (1.0 + u)


@triton.jit
def sigmoid_slope(x):
    """sigmoid(x) (1 - sigmoid(x)), without the cancellation of 1 - sigmoid near 1."""
    u = tl.exp(-tl.abs(x))
    return u / ((1.0 + u) * (1.0 + u))


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int,
    only_compile: bool = False,
) -> None:  # fmt: skip
    """Runs `kernel` on the device of its first argument, or compiles and loads it for these arguments."""
    device = arguments[0].device
    with made_current(device):
        if not only_compile:
            kernel[grid](*arguments, **constants, num_warps=warps)
        elif device.type == "cuda":
            kernel.run(*arguments, **constants, num_warps=warps, grid=grid, warmup=True)._init_handles()
