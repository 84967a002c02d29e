"""What `fusepatch.parity()` returns: the verdict, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .. import __version__, catalogue, table
from .bound import LEAST_ELEMENTS, ROW, STANDARD, STRAY, WHOLE, TensorError, by_kind, together

SHOWN = 20
"""Tensors outside their bound that `print(report)` shows."""


class Verdict(Enum):
    """What came of it. Only the first is a pass."""

    PASSED = "passed"
    FAILED = "failed"
    BASELINE_FAILED = "baseline-failed"
    """The unpatched model crashed, gave NaN, or is too far from fp32 to judge anything by: nothing is claimed."""
    NOTHING_NATIVE = "nothing-native"
    """The same results, for no call was served by us."""

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 nothing was judged (2 is argparse's)."""
        return {"passed": 0, "failed": 1}.get(self.value, 3)


@dataclass(frozen=True)
class ParityReport:
    """What `parity()` found; `print()` it for people, `to_dict()` it for programs, `plot()` it for a picture."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it did not pass."""
    model: str
    parameters: int
    dtypes: tuple[str, ...]
    """Of the weights."""
    reference_dtype: str
    device: str
    ops: tuple[str, ...]
    seed: int
    in_place: tuple[TensorError, ...]
    """Of each patched module, on the call that it served in the patched arm."""
    whole: TensorError | None
    """The root mean square over the large ones of `tensors`; None where there are none."""
    tensors: tuple[TensorError, ...]
    """Of the whole model, in its order; empty where an arm did not finish."""
    native_expected: int
    unpatched_native: int
    patched_native: int
    calls: Mapping[str, int]
    """Of the patched arm, by route."""
    declines: Mapping[str, int]
    """Of the patched arm, by reason."""
    seconds: Mapping[str, float]
    """By arm, the first calls' compilation included: no measure of speed."""
    notes: tuple[str, ...]
    traceback: str | None
    """Of the arm that raised."""

    @property
    def passed(self) -> bool:
        """Whether calls ran natively and every tensor is within its bound."""
        return self.verdict is Verdict.PASSED

    @property
    def exit_code(self) -> int:
        """What the command line exits with."""
        return self.verdict.exit_code

    def worst_first(self) -> list[TensorError]:
        """The tensors, those that use most of their bound first."""
        return sorted((*self.in_place, *self.tensors), key=lambda error: -error.use)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, fit for JSON; what is infinite or not a number is None."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **found,
            "verdict": self.verdict.value,
            "passed": self.passed,
            "exit_code": self.exit_code,
            **{name: list(found[name]) for name in ("reasons", "dtypes", "ops", "notes")},
            **{name: dict(found[name]) for name in ("calls", "declines", "seconds")},
            "whole": None if self.whole is None else _tensor_to_dict(self.whole),
            "in_place": [_tensor_to_dict(error) for error in self.in_place],
            "tensors": [_tensor_to_dict(error) for error in self.tensors],
            "versions": _versions(),
        }

    def table(self, limit: int | None = None) -> str:
        """One row for each tensor, those in place too, or for the `limit` worst ones."""
        return _table_of(self.worst_first()[:limit])

    def plot(self, path: str | Path) -> None:
        """Writes a picture of every tensor's error ratio; its format is that of the file name. Needs matplotlib."""
        from .plot import plot

        plot(self, path)

    def __str__(self) -> str:
        device = f"{', '.join(self.dtypes) or 'no weights'} on {self.device}"
        lines = [
            f"parity of {', '.join(self.ops)}: {self.verdict.value.upper()}",
            *(f"  {reason}" for reason in self.reasons),
            f"{self.model}, {self.parameters:,} parameters, {device}, seed {self.seed}",
            f"native calls: {self.patched_native} patched (expected {self.native_expected}), {self.unpatched_native} "
            f"unpatched{self._routes()}",
        ]
        if self.tensors:
            lines += ["", *self._tensors()]
        lines += [f"note: {note}" for note in self.notes]
        if self.traceback is not None:
            lines += ["", self.traceback.rstrip()]
        return "\n".join(lines)

    def _routes(self) -> str:
        calls = ", ".join(f"{route} {count}" for route, count in self.calls.items())
        why = ", ".join(f"{reason} {count}" for reason, count in self.declines.items())
        return (f"; by route: {calls}" if calls else "") + (f"; not the fastest because of: {why}" if why else "")

    def _tensors(self) -> list[str]:
        lines = [f"Relative L2 errors against the {self.reference_dtype} reference."]
        if self.in_place:
            lines += [
                "",
                "In place: what each patched module gave in the model. Unpatched: the library, on the same input.",
                _within(self.in_place, f"{STANDARD}; for the worst row of a tensor, {ROW}"),
                f"(wider where a tensor's size lies in fewer than {LEAST_ELEMENTS} of its elements)",
                "",
                kinds(self.in_place),
            ]
        lines += [
            "",
            f"The whole model. {_within(self.tensors, f'no more than {STRAY.factor:g} x the worst of a kind')}",
        ]
        if self.whole is not None:
            lines.append(
                f"Root mean square: unpatched {self.whole.unpatched:.2e}, patched {self.whole.patched:.2e}; the bound "
                f"is {WHOLE}."
            )
        lines += ["", kinds(self.tensors)]
        broken = [error for error in self.worst_first() if not error.holds]
        if broken:
            rest = len(broken) - SHOWN
            lines += ["", "Outside their bound, the worst first:", "", _table_of(broken[:SHOWN])]
            lines += [f"... and {rest} more, in report.table()"] if rest > 0 else []
        return lines

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def kinds(errors: Sequence[TensorError], control: Mapping[str, Sequence[TensorError]] | None = None) -> str:
    """A table with one row for the tensors of the same name in all layers.

    `control` has the errors of another arm as its `patched`, by kind: two further columns.
    """
    headers = ["tensor", "tensors", "unpatched", "patched", "ratio", "largest ratio", "of bound"]
    rows: list[list[object]] = []
    for name, found in by_kind(errors).items():
        every = together(name, found)
        row: list[object] = [name, len(found), f"{every.unpatched:.2e}", f"{every.patched:.2e}", f"{every.ratio:.3f}"]
        row += [f"{max(error.ratio for error in found):.3f}", _percent(max(error.use for error in found))]
        if control is not None:
            others = control[name]
            row += [f"{together(name, others).ratio:.3f}", f"{max(error.ratio for error in others):.3f}"]
        rows.append(row)
    return table.render([*headers, *(["control", "largest"] if control is not None else [])], rows)


def _table_of(errors: Sequence[TensorError]) -> str:
    rows = [
        (
            error.name,
            error.kind,
            error.elements,
            f"{error.unpatched:.2e}",
            f"{error.patched:.2e}",
            f"{error.ratio:.3f}",
            _percent(error.use),
            str(error.bound) if error.measure is None else f"{error.bound.factor:g} x {error.measure:.2e}",
        )
        for error in errors
    ]
    return table.render(("tensor", "kind", "elements", "unpatched", "patched", "ratio", "of bound", "bound"), rows)


def _percent(use: float) -> str:
    return f"{use:.0%}" if math.isfinite(use) else "inf"


def _within(errors: Sequence[TensorError], rule: str) -> str:
    return f"{sum(error.holds for error in errors)} of {len(errors)} tensors are within their bound: {rule}."


def _tensor_to_dict(error: TensorError) -> dict[str, Any]:
    found = {**dataclasses.asdict(error), "ratio": error.ratio, "use": error.use, "holds": error.holds}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def _versions() -> dict[str, str | None]:
    import torch

    libraries = {target.library: target.version() for target in catalogue.TARGETS}
    return {"fusepatch": __version__, "torch": str(torch.__version__), **libraries}
