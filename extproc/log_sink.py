"""Where log lines go: standard output, as long as it takes them. No log is worth a turn.

A full disk fails a write, and a pipe whose reader has stopped blocks it, and with it every stream of the process. So what
cannot be written at once is dropped and counted, and when there is room again the next line begins a line.
"""

from __future__ import annotations

import os
import select

STDOUT = 1


class LogSink:
    """A file for log lines that never raises and never waits. ``dropped`` counts lines lost in whole or in part."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._is_in_a_line = False

    def write(self, text: str) -> int:
        """Write what fits of a line (or several), at once; returns the length of ``text`` whatever became of it."""
        data = text.encode(errors="backslashreplace")
        rest = memoryview(b"\n" + data if self._is_in_a_line else data)
        try:
            # A pipe that is ready takes this much without blocking.
            while rest and self._is_ready():
                rest = rest[self._written(rest[: select.PIPE_BUF]) :]
        except OSError:
            pass
        if rest:
            self.dropped += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def _is_ready(self) -> bool:
        poll = select.poll()  # a new one: several threads log, and a poll object is for one at a time
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def _written(self, piece: memoryview) -> int:
        count = os.write(self._descriptor, piece)
        if count:
            self._is_in_a_line = piece[count - 1] != ord("\n")
        return count


SINK = LogSink(STDOUT)
"""This process's."""
