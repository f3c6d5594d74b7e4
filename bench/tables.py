"""Plain tables that read the same on a terminal and in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (head, *rows)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))
