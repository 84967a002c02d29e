"""What `fusepatch.parity()` returns: the verdict, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .. import __version__, catalogue, table
from .bound import LEAST_ELEMENTS, STANDARD, TensorError

SHOWN = 20
"""Rows of the table that `print(report)` shows."""


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
    tensors: tuple[TensorError, ...]
    """In the order of the model; empty where an arm did not finish."""
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
        return sorted(self.tensors, key=lambda error: -error.use)

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
            "tensors": [_tensor_to_dict(error) for error in self.worst_first()],
            "versions": _versions(),
        }

    def table(self, limit: int | None = None) -> str:
        """One row for each tensor, or for the `limit` worst ones."""
        rows = [
            (
                error.name,
                error.kind,
                error.elements,
                f"{error.unpatched:.2e}",
                f"{error.patched:.2e}",
                f"{error.ratio:.3f}",
                f"{error.use:.0%}" if math.isfinite(error.use) else "inf",
                "" if error.bound == STANDARD else str(error.bound),
            )
            for error in self.worst_first()[:limit]
        ]
        headers = ("tensor", "kind", "elements", "unpatched", "patched", "ratio", "of bound", "bound of its own")
        return table.render(headers, rows)

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
        within, judged = sum(e.holds for e in self.tensors), sum(e.bound == STANDARD for e in self.tensors)
        rest = len(self.tensors) - SHOWN
        return [
            f"{within} of {len(self.tensors)} tensors are within their bound; for the {judged} of at least "
            f"{LEAST_ELEMENTS} elements",
            f"that is {STANDARD}: relative L2 errors against the {self.reference_dtype} reference",
            "",
            self.table(SHOWN),
            *([f"... and {rest} more, in report.table()"] if rest > 0 else []),
        ]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _tensor_to_dict(error: TensorError) -> dict[str, Any]:
    found = {**dataclasses.asdict(error), "ratio": error.ratio, "use": error.use, "holds": error.holds}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def _versions() -> dict[str, str | None]:
    import torch

    libraries = {target.library: target.version() for target in catalogue.TARGETS}
    return {"fusepatch": __version__, "torch": str(torch.__version__), **libraries}
