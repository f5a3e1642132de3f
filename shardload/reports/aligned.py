"""Rows of cells as lines of text: columns aligned, nothing truncated.

On a terminal that is too narrow for the columns, a row takes several lines, broken between cells.
"""

from __future__ import annotations

from collections.abc import Iterable


def aligned(table: Iterable[Iterable[str]], *, width: int | None = None) -> str:
    """Format rows as lines, with cells padded to the width of their column.

    ``width``: columns of the terminal; ``None`` for lines of any length, which `cut` and `grep` need.
    """
    rows = [tuple(row) for row in table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if width is not None and max(map(len, lines), default=0) > width:
        lines = [line for row in rows for line in _stacked(row, width)]
    return "".join(f"{line}\n" for line in lines)


def _stacked(row: tuple[str, ...], width: int) -> list[str]:
    """Return a row as lines for a narrow terminal of ``width`` columns: the first cell, then the others, indented."""
    lines = [row[0]]
    for cell in row[1:]:
        if len(lines) > 1 and len(lines[-1]) + 2 + len(cell) <= width:
            lines[-1] += f"  {cell}"
        else:
            lines.append(f"    {cell}")
    return lines
