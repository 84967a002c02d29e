"""Plain text tables, for terminals and logs alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def render(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; a cell that looks like a number is set to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in cells)])
