"""The README's tables, from the results files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import results
from .results import Row

_TITLES = {
    "train": "Forward + backward",
    "train_graph": "Forward + backward, in a CUDA graph",
    "forward": "Forward, no gradients",
    "backward": "Backward",
    "host": "Host time",
    "gate_up": "h, and gate and up, from x",
    "d_gate_up": "Gradients of gate and up from dout",
    "dx": "Gradient of x",
    "d_weights": "Gradients of the weights of gate and up",
    "d_down": "Gradient of the down projection's weight",
}


def tables(benchmark: str, runs: Sequence[str] | None, modes: Sequence[str], folder: Path, base: str = "eager") -> str:
    """For each GPU and mode a table: medians, and in brackets the ratio to the arm `base` of the same run."""
    found = []
    for path in results.files_of(benchmark, folder):
        rows = results.read(path)
        wanted = list(runs or [results.latest_run(rows)])
        for mode in modes:
            found += [_table([row for row in rows if row.origin.run == run], mode, base) for run in wanted]
    text = "\n\n".join(table for table in found if table)
    if not text:
        raise ValueError(f"no rows of {benchmark} in {folder}")
    return text


def _table(rows: Sequence[Row], mode: str, base: str) -> str:
    """Cases and arms, the more of them downwards. Nothing where the run has no such rows."""
    times = [row for row in rows if (row.figure.mode, row.figure.metric) == (mode, "time")]
    if not times:
        return ""
    once = {row.figure.arm for row in rows if row.figure.metric == "backward_passes" and row.figure.p50 < 2}
    names = {row.figure.arm: row.figure.arm + (" \\*" if row.figure.arm in once else "") for row in times}
    cases = {row.figure.case: row.figure.case for row in times}
    found = {(row.figure.case, row.figure.arm): row for row in times}
    cells = {(case, arm): _cell(found.get((case, arm)), found.get((case, base))) for case in cases for arm in names}
    if len(names) > len(cases):
        grid = _grid("arm", names, cases, lambda arm, case: cells[case, arm])
    else:
        grid = _grid("case", cases, names, lambda case, arm: cells[case, arm])
    below = f"Medians; in brackets, time over {base}'s in the same run." if base in names else "Medians."
    if once & set(names):
        below += " \\* A second backward pass through one forward is wrong or raises."
    title = f"{_TITLES.get(mode, mode)}, {times[0].figure.unit}, {_origin(times[0])}:"
    return "\n".join((title, "", *grid, "", below))


def _grid(
    corner: str, down: Mapping[str, str], across: Mapping[str, str], cell: Callable[[str, str], str]
) -> list[str]:
    """The lines of a table in markdown; what is down and across, with how each is written."""
    head = [f"| {corner} | " + " | ".join(across.values()) + " |", "| --- " * (len(across) + 1) + "|"]
    return head + [
        f"| {text} | " + " | ".join(cell(one, other) for other in across) + " |" for one, text in down.items()
    ]


def _cell(row: Row | None, base: Row | None) -> str:
    if row is None:
        return "-"
    if base is None or row is base:
        return f"{row.figure.p50:.4g}"
    return f"{row.figure.p50:.4g} ({results.ratio(row, base)[1]:.3f})"


def _origin(row: Row) -> str:
    origin = row.origin
    return f"{origin.gpu}, commit {origin.commit}, {origin.date}, run {origin.run}"


def put_between_markers(file: Path, benchmark: str, text: str) -> None:
    """Replaces what stands between the marker comments of `file`. Raises ValueError where it has none."""
    begin, end = markers(benchmark)
    before, found_begin, rest = file.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{file} has no lines {begin} and {end} to put the table between")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def markers(benchmark: str) -> tuple[str, str]:
    """The comments that a table stands between."""
    return (
        f"<!-- benchmarks {benchmark}: made by python -m benchmarks table -->",
        f"<!-- end benchmarks {benchmark} -->",
    )
