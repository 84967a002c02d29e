"""The measure of every self-check: how far results are from those in fp64, and how far they may be."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in L2, in fp64; NaN where a number is."""
    exact = expected.double()
    return float((actual.double() - exact).norm() / exact.norm())


def over_bound(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> list[tuple[str, float, float]]:
    """(name, error, bound) of each result that is further from `exact`, in fp64, than parity allows beside `plain`,
    PyTorch's results in the same dtype."""
    found = []
    for name, expected in exact.items():
        error, bound = relative_error(ours[name], expected), 1.25 * relative_error(plain[name], expected) + 1e-4
        if not error <= bound:  # NaN too
            found.append((name, error, bound))
    return found
