"""The pictures: for each mode one file, with a panel per case and a bar per arm, from the results files alone."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import results
from .results import Row

_TITLES = {
    ("train", "time"): "forward + backward",
    ("forward", "time"): "forward, no gradients",
    ("backward", "time"): "backward",
    ("host", "time"): "host time of forward + backward",
    ("train", "peak"): "peak memory of a step of eight MLPs, beyond parameters and gradients",
    ("train", "saved"): "memory saved for the backward pass, eight MLPs",
}


class Bar(NamedTuple):
    """One arm's ratio to the base."""

    arm: str
    low: float
    middle: float
    high: float


def draw_all(benchmark: str, runs: Sequence[str] | None, base: str, folder: Path, to: Path) -> list[Path]:
    """Draws every picture of a benchmark, for each GPU; returns the files. Raises ValueError where there is none."""
    drawn = []
    for path in results.files_of(benchmark, folder):
        rows = results.read(path)
        wanted = list(runs or [results.latest_run(rows)])
        rows = [row for row in rows if row.origin.run in wanted]
        for mode, metric in _TITLES:
            # The floor holds nothing in memory, and its host time is nobody's.
            over = base if metric == "time" and mode != "host" else "eager"
            panels = bars(rows, mode, metric, over)
            if panels:
                drawn += _draw(panels, rows[0], mode, metric, over, to / path.parent.name)
    if not drawn:
        raise ValueError(f"no rows of {benchmark} to draw in {folder}")
    return drawn


def bars(rows: Sequence[Row], mode: str, metric: str, base: str) -> dict[str, list[Bar]]:
    """By case and run: the arms' ratios to `base`, each within its run."""
    panels: dict[str, list[Bar]] = {}
    shown = [row for row in rows if (row.figure.mode, row.figure.metric) == (mode, metric)]
    several = len({row.origin.run for row in shown}) > 1
    bases = {(row.figure.case, row.origin.run): row for row in shown if row.figure.arm == base}
    for row in shown:
        over = bases.get((row.figure.case, row.origin.run))
        if over is not None:
            name = f"{row.figure.case} ({row.origin.run})" if several else row.figure.case
            panels.setdefault(name, []).append(Bar(row.figure.arm, *results.ratio(row, over)))
    return panels


def _draw(panels: dict[str, list[Bar]], row: Row, mode: str, metric: str, base: str, folder: Path) -> list[Path]:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figure_class: Any = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise ImportError('the pictures need matplotlib: pip install "fusepatch[bench]"') from None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    most = max(len(found) for found in panels.values())
    # A Figure of its own, without pyplot: no window, and no display is asked for.
    figure = figure_class(figsize=(6.0 * columns, 0.6 + lines * (0.9 + 0.26 * most)), layout="constrained")
    for index, (name, found) in enumerate(panels.items()):
        _panel(figure.add_subplot(lines, columns, index + 1), name, found, base)
    figure.suptitle(f"{_TITLES[mode, metric]}, over {base} (lower is better)\n{_origin(row)}", fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{row.figure.benchmark}_{mode}_{metric}.{kind}" for kind in ("svg", "png")]
    with matplotlib.rc_context({"svg.hashsalt": "fusepatch", "svg.fonttype": "none"}):
        figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=120)
    return paths


def _panel(axes: Any, name: str, found: list[Bar], base: str) -> None:
    middles = [bar.middle for bar in found]
    axes.barh(range(len(found)), middles, color=[_colour(bar.arm, base) for bar in found], height=0.7)
    whiskers = [[max(0.0, bar.middle - bar.low) for bar in found], [max(0.0, bar.high - bar.middle) for bar in found]]
    axes.errorbar(middles, range(len(found)), xerr=whiskers, fmt="none", ecolor="0.15", elinewidth=1, capsize=2)
    for index, bar in enumerate(found):
        axes.text(bar.high + 0.01 * max(middles), index, f" {bar.middle:.3f}", va="center", fontsize=7)
    axes.axvline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.15 * max(bar.high for bar in found))
    axes.set_yticks(range(len(found)), [bar.arm for bar in found], fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(name, fontsize=8, loc="left")


def _colour(arm: str, base: str) -> str:
    if arm in (base, "eager", "gemm_floor", "fusepatch_off"):
        return "0.55"
    return "tab:green" if "fusepatch" in arm else "tab:blue"


def _origin(row: Row) -> str:
    origin = row.origin
    return (
        f"{origin.gpu}, driver {origin.driver}, {origin.date}, commit {origin.commit}; bars: median, whiskers: p20-p80"
    )
