"""A line that tells how far a measurement is. On a terminal it is rewritten in place; elsewhere it is kept rare."""

from __future__ import annotations

import sys
import time
from typing import Final

RARE_SECONDS: Final = 10.0


class ProgressLine:
    """Writes to standard error, so that standard output holds results only."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._told_at = float("-inf")
        self._width = 0

    def tell(self, text: str) -> None:
        """Show ``text`` in place of what was shown before."""
        now = time.monotonic()
        if self._is_terminal:
            sys.stderr.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif now - self._told_at >= RARE_SECONDS:
            self._told_at = now
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._is_terminal and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        self._width = 0
