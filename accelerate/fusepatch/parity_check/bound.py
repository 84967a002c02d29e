"""The parity bound: how far from the reference a tensor may be, given how far the unpatched library's own is.

Pure arithmetic on pairs of tensors, for `fusepatch.parity()` and for whoever else compares three arms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """`patched <= factor * unpatched + floor`, of errors against the reference."""

    factor: float
    floor: float

    def allows(self, unpatched: float) -> float:
        """The largest error that the patched arm may have."""
        return self.factor * unpatched + self.floor

    def __str__(self) -> str:
        return f"{'' if self.factor == 1 else f'{self.factor:g} x '}unpatched + {self.floor:g}"


STANDARD = Bound(1.25, 1e-4)
"""For tensors of at least LEAST_ELEMENTS. Over seeds, the rounding of our routes stays within 1.20."""

LEAST_ELEMENTS = 256
"""Below it, the ratio of two errors is an accident: of 64 elements it varies by a tenth from seed to seed."""

SCALAR = Bound(1.0, 0.01)
"""For an output that is one number, such as the loss: its error is |difference| / max(1, |reference|).

A mean over tokens may by accident be exact in one arm, so a factor would mean nothing. bfloat16 has 8 significant bits:
storing a loss rounds it by up to 0.004 of its size, and 0.01 is twice that, with room for what led to it.
"""

SMALL = Bound(1.0, 0.5)
"""For all other tensors of fewer than LEAST_ELEMENTS, relative L2.

Finds what is missing, doubled or of the wrong sign, and no more: a gradient of few elements can be a small difference
of large sums. What is wrong with it in a subtler way is wrong in the large tensors around it too, which are held to
STANDARD.
"""

USABLE_ERROR = 0.5
"""An unpatched tensor that is further off measures nothing: its bound would allow a patched tensor of zeros."""


@dataclass(frozen=True)
class OwnBound:
    """A gradient that is known to be noisier than the rest, and the bound that it has instead."""

    op: str
    pattern: str
    """A regular expression that the tensor's whole name matches."""
    bound: Bound
    why: str


OWN_BOUNDS: tuple[OwnBound, ...] = ()
"""The gated MLP has none: each of its gradients comes from one GEMM of tensors that are rounded as the library's."""


class TensorName(NamedTuple):
    """Which tensor of an arm."""

    kind: str
    """`output`, `gradient` (of a parameter) or `input gradient`."""
    name: str


@dataclass(frozen=True)
class TensorError:
    """The errors of one tensor against the reference, and the bound it is held to."""

    kind: str
    name: str
    elements: int
    unpatched: float
    patched: float
    """Infinite where the tensor is missing, of another shape, or not finite throughout."""
    bound: Bound = STANDARD

    @property
    def ratio(self) -> float:
        """Patched over unpatched."""
        return self.patched / self.unpatched if self.unpatched else math.inf if self.patched else 1.0

    @property
    def use(self) -> float:
        """Which part of what the bound allows is used; above 1 fails."""
        if not (math.isfinite(self.patched) and math.isfinite(self.unpatched)):
            return math.inf
        return self.patched / self.bound.allows(self.unpatched)

    @property
    def holds(self) -> bool:
        """Whether the tensor is within its bound."""
        return self.use <= 1


def bound_of(tensor: TensorName, elements: int, ops: tuple[str, ...]) -> Bound:
    """The bound that a tensor is held to, where `ops` are judged."""
    for own in OWN_BOUNDS:
        if own.op in ops and re.fullmatch(own.pattern, tensor.name):
            return own.bound
    if elements >= LEAST_ELEMENTS:
        return STANDARD
    return SCALAR if _is_scalar(tensor, elements) else SMALL


def errors_of(tensors: Mapping[TensorName, Tensor], reference: Mapping[TensorName, Tensor]) -> dict[TensorName, float]:
    """The error of each tensor of the reference; infinite where it is missing, of another shape, or not finite."""
    return {
        name: error_of(name, tensors[name], expected) if name in tensors else math.inf
        for name, expected in reference.items()
    }


def error_of(name: TensorName, actual: Tensor, expected: Tensor) -> float:
    """|actual - expected|_2 / |expected|_2; for a scalar output, over max(1, |expected|)."""
    if actual.shape != expected.shape:
        return math.inf
    difference, size = _norms(actual, expected)
    least = 1.0 if _is_scalar(name, expected.numel()) else 1e-30
    error = difference / max(size, least)
    return error if math.isfinite(error) else math.inf


def _is_scalar(name: TensorName, elements: int) -> bool:
    return elements == 1 and name.kind == "output"


_CHUNK = 2**24


def _norms(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(|actual - expected|_2, |expected|_2), summed in fp64 by chunks: a whole embedding in fp64 may not fit."""
    on = actual.device if actual.device.type == "cuda" else torch.device("cpu")
    flat, flat_expected = actual.detach().reshape(-1), expected.detach().reshape(-1)
    difference = size = torch.zeros((), dtype=torch.float64, device=on)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat_expected[start : start + _CHUNK].to(on, torch.float64)
        size = size + part.square().sum()
        difference = difference + (flat[start : start + _CHUNK].to(on, torch.float64) - part).square().sum()
    return math.sqrt(float(difference)), math.sqrt(float(size))
