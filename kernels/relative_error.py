"""The measure of every self-check: how far results are from those in fp64, and how far they may be."""

from __future__ import annotations

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in L2, in fp64; NaN where a number is."""
    exact = expected.double()
    return float((actual.double() - exact).norm() / exact.norm())


def bound_beside(plain: Tensor, expected: Tensor) -> float:
    """What a kernel's relative error may be where plain PyTorch's results in the same dtype are `plain`."""
    return 1.25 * relative_error(plain, expected) + 1e-4
