"""The parity bound: how far from the reference a tensor may be, given how far the unpatched library's own is.

Pure arithmetic on pairs of tensors, for `fusepatch.parity()` and for whoever else compares three arms.

Two rules. What a patched module gave in the model is judged tensor by tensor (STANDARD), against the library's module
on the very same input and incoming gradient. What came out of the whole model is judged by the root mean square over
all its tensors (WHOLE), and each tensor only for straying (STRAY): one rounding in an early layer moves every later
one, so the errors of single tensors are draws from a distribution. `python -m benchmarks.parity_noise` compares
SmolLM2-135M in bfloat16 with itself, unpatched, its MLPs' channels summed in another order: from two layers on, tensors
of the library are outside STANDARD of the library's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""For tensors of at least LEAST_ELEMENTS, of at least LEAST_TOKENS. Over seeds, our rounding stays within 1.20: each
gradient of the gated MLP comes from one GEMM of tensors that are rounded as the library's.
"""

WHOLE = Bound(1.5, 1e-4)
"""For the root mean square over these tensors in a whole model. In `benchmarks.parity_noise`, 36 steps of 1 to 30
layers, the patched model needs 1.26 and the library with another order of a sum 1.12.
"""

STRAY = Bound(3.0, 1e-4)
"""For one of these tensors in a whole model, on the largest unpatched error among the tensors of its kind.

Finds what is wrong, doubled or missing in one layer; the root mean square over all finds what is a little wrong in
many.
"""

ROW = Bound(3.0, 1e-3)
"""In place, for the worst row of a tensor, on the library's worst row: of many, the largest error hardly varies.

Finds what a tile at the edge does to few rows, which is nothing beside a whole tensor: at 1,024 tokens a last row that
is 5% off moves the relative L2 error of the output by less than a tenth.
"""

LEAST_ELEMENTS = 256
"""Below it, the ratio of two errors is an accident: of 64 elements it varies by a tenth from seed to seed."""

LEAST_TOKENS = 64
"""Below it the same holds of any tensor: at 7 tokens, by chance, a ratio of 1.4 was seen, and 4.9 at one."""

SCALAR = Bound(1.0, 0.01)
"""For an output that is one number, such as the loss: its error is |difference| / max(1, |reference|).

A mean over tokens may by accident be exact in one arm, so a factor would mean nothing. bfloat16 has 8 significant bits:
storing a loss rounds it by up to 0.004 of its size, and 0.01 is twice that, with room for what led to it.
"""

SMALL = Bound(1.0, 0.5)
"""For all other tensors of fewer than LEAST_ELEMENTS, or of fewer than LEAST_TOKENS, relative L2.

Finds what is missing, doubled or of the wrong sign, and no more: a gradient of few elements can be a small difference
of large sums. What is wrong with it in a subtler way is wrong in the large tensors around it too, which are held to
STANDARD.
"""

USABLE_ERROR = 0.5
"""An unpatched tensor that is further off measures nothing: its bound would allow a patched tensor of zeros."""


_CHUNK = 2**24
"""Elements that are taken to fp64 at once: a whole embedding may not fit."""


class TensorName(NamedTuple):
    """Which tensor of an arm."""

    kind: str
    """`output`, `gradient` (of a parameter) or `input gradient`; `in place` for those of one patched module."""
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
    measure: float | None = None
    """The unpatched error that the bound is on; None for the tensor's own."""

    @property
    def ratio(self) -> float:
        """Patched over unpatched."""
        return self.patched / self.unpatched if self.unpatched else math.inf if self.patched else 1.0

    @property
    def use(self) -> float:
        """Which part of what the bound allows is used; above 1 fails."""
        if not (math.isfinite(self.patched) and math.isfinite(self.unpatched)):
            return math.inf
        return self.patched / self.bound.allows(self.unpatched if self.measure is None else self.measure)

    @property
    def holds(self) -> bool:
        """Whether the tensor is within its bound."""
        return self.use <= 1


def bound_of(tensor: TensorName, elements: int, tokens: int | None = None) -> Bound:
    """The bound that a tensor of so many tokens is held to; None for enough of them."""
    if elements >= LEAST_ELEMENTS and (tokens is None or tokens >= LEAST_TOKENS):
        return STANDARD
    return SCALAR if _is_scalar(tensor, elements) else SMALL


def bound_in_place(tensor: TensorName, expected: Tensor, tokens: int) -> Bound:
    """The same for what one patched module gave, `expected` being the reference.

    Where few elements carry a tensor's size (the massive activations of an attention sink), its error is that of so
    many roundings, and the ratio of two such errors varies by 1 / sqrt(their number). In SmolLM2-135M, on 64 tokens,
    three elements carry the output of layer 1, and the library happens to round them well: a ratio of 1.40.
    """
    bound = bound_of(tensor, expected.numel(), tokens)
    if bound != STANDARD:
        return bound
    carried_by = elements_that_carry(expected)
    return bound if carried_by >= LEAST_ELEMENTS else Bound(1 + 4 / math.sqrt(carried_by), STANDARD.floor)


def elements_that_carry(tensor: Tensor) -> float:
    """(sum of x^2)^2 / sum of x^4: how many elements the size of a tensor lies in, from 1 to all of them."""
    largest = float(tensor.detach().abs().max())
    if not 0 < largest < math.inf:
        return float(tensor.numel())
    squares = fourths = 0.0
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        weights = (flat[start : start + _CHUNK].double() / largest).square()
        squares += float(weights.sum())
        fourths += float(weights.square().sum())
    return squares**2 / fourths


# ----------------------------------------------------------------------------------------------------- a whole model


def kind_of(name: str) -> str:
    """The tensor's name without the numbers of layers and calls: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", re.sub(r", call \d+(?=: )", "", name))


def by_kind(errors: Iterable[TensorError]) -> dict[str, list[TensorError]]:
    """The tensors of the same name in all layers, together."""
    found: dict[str, list[TensorError]] = {}
    for error in errors:
        found.setdefault(kind_of(error.name), []).append(error)
    return found


def in_a_whole_model(errors: Sequence[TensorError]) -> list[TensorError]:
    """The same, with STRAY in the place of STANDARD."""
    large = by_kind(error for error in errors if error.bound == STANDARD)
    worst = {kind: max(error.unpatched for error in found) for kind, found in large.items()}
    return [
        replace(error, bound=STRAY, measure=worst[kind_of(error.name)]) if error.bound == STANDARD else error
        for error in errors
    ]


def together(name: str, errors: Sequence[TensorError]) -> TensorError:
    """The root mean square of several tensors' errors, which is held to WHOLE."""
    return TensorError(
        "root mean square",
        name,
        sum(error.elements for error in errors),
        root_mean_square(error.unpatched for error in errors),
        root_mean_square(error.patched for error in errors),
        WHOLE,
    )


def root_mean_square(errors: Iterable[float]) -> float:
    """What it says; 0 for none."""
    squares = [error**2 for error in errors]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


# -------------------------------------------------------------------------------------------------------- the errors


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


def worst_row_of(actual: Tensor, expected: Tensor) -> float:
    """max over rows of |actual - expected|_2 / max(|expected|_2, the median of |expected|_2), of [..., N] tensors.

    The median keeps a row that is a small difference of large sums from counting as wrong.
    """
    if actual.shape != expected.shape:
        return math.inf
    width = expected.shape[-1]
    rows, rows_expected = (t.detach().to("cpu").reshape(-1, width) for t in (actual, expected))
    step = max(1, _CHUNK // width)
    sizes, differences = [], []
    for start in range(0, len(rows), step):
        part = rows_expected[start : start + step].double()
        sizes.append(part.norm(dim=-1))
        differences.append((rows[start : start + step].double() - part).norm(dim=-1))
    size = torch.cat(sizes)
    present = size[size > 0]
    least = float(present.median()) if len(present) else 1e-30
    worst = float((torch.cat(differences) / size.clamp_min(least)).max())
    return worst if math.isfinite(worst) else math.inf


def _is_scalar(name: TensorName, elements: int) -> bool:
    return elements == 1 and name.kind == "output"


def _norms(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(|actual - expected|_2, |expected|_2), summed in fp64."""
    on = actual.device if actual.device.type == "cuda" else torch.device("cpu")
    flat, flat_expected = actual.detach().reshape(-1), expected.detach().reshape(-1)
    difference = size = torch.zeros((), dtype=torch.float64, device=on)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat_expected[start : start + _CHUNK].to(on, torch.float64)
        size = size + part.square().sum()
        difference = difference + (flat[start : start + _CHUNK].to(on, torch.float64) - part).square().sum()
    return math.sqrt(float(difference)), math.sqrt(float(size))
