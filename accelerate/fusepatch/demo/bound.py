"""The parity bound: how far from the reference a tensor may be, given how far the unpatched library is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .. import table

FACTOR, FLOOR = 1.25, 1e-4
LEAST_ELEMENTS = 256
"""Fewer are not judged: their error may be an accident."""
LOSS_FLOOR = 0.01
"""For the loss, one number, whose error ratio would be noise."""

BOUND = f"{FACTOR} x unpatched + {FLOOR:g}"


@dataclass(frozen=True)
class TensorError:
    """Relative L2 errors of one tensor, or of several together, against the reference."""

    name: str
    elements: int
    unpatched: float
    patched: float

    @property
    def ratio(self) -> float:
        """Patched over unpatched."""
        return self.patched / self.unpatched if self.unpatched else math.inf if self.patched else 1.0

    @property
    def use(self) -> float:
        """Which part of the bound is used up; above 1 fails."""
        if not (math.isfinite(self.patched) and math.isfinite(self.unpatched)):
            return math.inf
        return self.patched / (FACTOR * self.unpatched + FLOOR)


def errors_of(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each tensor; infinite where one is missing or not finite."""
    return {
        name: _relative_error(tensors[name], expected) if name in tensors else math.inf
        for name, expected in reference.items()
    }


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    error = float(difference.norm()) / max(float(expected.double().norm()), 1e-30)
    return error if math.isfinite(error) else math.inf


def judged(errors: Iterable[TensorError]) -> list[TensorError]:
    """Those large enough to be judged."""
    return [error for error in errors if error.elements >= LEAST_ELEMENTS]


def together(name: str, errors: Sequence[TensorError]) -> TensorError:
    """The root mean square of several tensors' errors."""
    return TensorError(
        name,
        sum(error.elements for error in errors),
        root_mean_square(error.unpatched for error in errors),
        root_mean_square(error.patched for error in errors),
    )


def root_mean_square(errors: Iterable[float]) -> float:
    """What it says; 0 for none."""
    squares = [error**2 for error in errors]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def render(what: str, errors: Sequence[TensorError], control: Sequence[TensorError] = ()) -> str:
    """A table with one row for the tensors of a kind in all layers.

    `control` has the errors of the unpatched library's other arm as its `patched`.
    """
    headers = [what, "tensors", "unpatched", "patched", "ratio", "largest ratio"]
    others = dict(_by_kind(control))
    rows: list[list[object]] = []
    for name, found in _by_kind(errors):
        all_of_them = together(name, found)
        row: list[object] = [name, len(found), f"{all_of_them.unpatched:.2e}", f"{all_of_them.patched:.2e}"]
        row += [f"{all_of_them.ratio:.3f}", f"{max(error.ratio for error in found):.3f}"]
        if others:
            row += [f"{together(name, others[name]).ratio:.3f}", f"{max(e.ratio for e in others[name]):.3f}"]
        rows.append(row)
    return table.render([*headers, *(["control", "largest"] if others else [])], rows)


def _by_kind(errors: Iterable[TensorError]) -> list[tuple[str, list[TensorError]]]:
    found: dict[str, list[TensorError]] = {}
    for error in errors:
        found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", error.name), []).append(error)
    return list(found.items())
