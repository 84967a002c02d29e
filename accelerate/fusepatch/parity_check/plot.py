"""The picture of a parity report: one dot for each tensor, and the bound."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bound import STANDARD, TensorError

if TYPE_CHECKING:
    from .report import ParityReport

ROWS = 150
"""In one column of the picture; as many columns are put side by side as it takes."""
_INCHES_PER_ROW = 0.15
_NAME_FONT = 7


def plot(report: ParityReport, path: str | Path) -> None:
    """Writes the picture. Raises ImportError without matplotlib, ValueError where there is nothing to show."""
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError('the picture needs matplotlib: pip install "fusepatch[plot]"') from None
    errors = (*report.in_place, *report.tensors)
    if not errors:
        raise ValueError(f"there is nothing to plot: {'; '.join(report.reasons)}")
    columns = math.ceil(len(errors) / ROWS)
    rows = math.ceil(len(errors) / columns)
    # A Figure of its own, without pyplot: no window, and nothing of the program's settings is changed.
    figure = figure_module.Figure(figsize=(7.5 * columns, 1.6 + _INCHES_PER_ROW * max(rows, 6)), layout="constrained")
    right = 1.1 * max(STANDARD.factor, *(x for x in map(_ratio, errors) if x <= _MOST))
    for index in range(columns):
        axes = figure.add_subplot(1, columns, index + 1)
        _draw(axes, errors[index * rows : (index + 1) * rows], rows, right, report.reference_dtype)
    figure.suptitle(
        f"fusepatch parity of {', '.join(report.ops)}: {report.verdict.value}\n{report.model}, "
        f"{', '.join(report.dtypes)} on {report.device}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


_MOST = 3.0
"""What lies further out is drawn as an arrow at the edge."""


def _ratio(error: TensorError) -> float:
    """Patched over unpatched error, with the bound's floor counted in: every bound is then at the same place."""
    return STANDARD.factor * error.use


def _draw(axes: Any, errors: tuple[TensorError, ...], rows: int, right: float, reference: str) -> None:
    for row, error in enumerate(errors):
        x = _ratio(error)
        colour = "tab:blue" if error.holds else "tab:red"
        fill = "full" if error.bound == STANDARD else "none"
        if x <= right:
            axes.plot(x, row, "o", color=colour, markersize=4, fillstyle=fill)
        else:
            axes.plot(right * 0.985, row, ">", color=colour, markersize=5, fillstyle=fill)
            text = f"{x:.3g}" if math.isfinite(x) else "not finite"
            axes.text(right * 0.97, row, text, ha="right", va="center", fontsize=_NAME_FONT, color=colour)
    axes.axvline(1.0, color="0.7", linewidth=0.8)
    axes.axvline(STANDARD.factor, color="tab:red", linewidth=1.0, linestyle="--")
    axes.annotate(
        "bound", (STANDARD.factor, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", color="tab:red",
        fontsize=_NAME_FONT,
    )  # fmt: skip
    axes.set_xlim(0, right)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(len(errors)), [_label(error) for error in errors], fontsize=_NAME_FONT)
    axes.set_xlabel(
        f"error against {reference}: patched / (unpatched + {STANDARD.floor / STANDARD.factor:g})\n"
        "hollow: fewer elements or a bound of its own, scaled to the same bound",
        fontsize=8,
    )
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", color="0.93", linewidth=0.5)
    axes.set_axisbelow(True)


def _label(error: TensorError) -> str:
    prefix = {"output": "output ", "input gradient": "input "}.get(error.kind, "")
    return prefix + error.name
