"""The README's tables, from the results files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import results
from .results import Row

_TITLES = {
    "train": "Forward + backward",
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
    """Cases down, arms across. Nothing where the run has no such rows."""
    times = [row for row in rows if (row.figure.mode, row.figure.metric) == (mode, "time")]
    if not times:
        return ""
    once = {row.figure.arm for row in rows if row.figure.metric == "backward_passes" and row.figure.p50 < 2}
    arms = list(dict.fromkeys(row.figure.arm for row in times))
    cells = {(row.figure.case, row.figure.arm): row for row in times}
    lines = [
        f"{_TITLES.get(mode, mode)}, {times[0].figure.unit}, {_origin(times[0])}:",
        "",
        "| case | " + " | ".join(arm + (" \\*" if arm in once else "") for arm in arms) + " |",
        "| --- " * (len(arms) + 1) + "|",
    ]
    for case in dict.fromkeys(row.figure.case for row in times):
        of_case = [_cell(cells.get((case, arm)), cells.get((case, base))) for arm in arms]
        lines.append(f"| {case} | " + " | ".join(of_case) + " |")
    lines += ["", f"Medians; in brackets, time over {base}'s in the same run."]
    if once & set(arms):
        lines[-1] += " \\* A second backward pass through one forward is wrong or raises."
    return "\n".join(lines)


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
