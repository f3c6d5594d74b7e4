"""Cut a response into server-sent events, on bytes, wherever the network cut it.

A chunk is not an event: one may hold several, or a piece of one, even half a character or half a line end. The splitter
hands out whole events with every byte they came with, so that joining what it hands out gives back the stream.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (line ends CR, LF or CRLF; an empty line dispatches).
"""

from __future__ import annotations

import re
from typing import Final

_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LONGEST_SPLIT_END: Final = 3
"""An event's end is at most 4 bytes, so at most 3 of them can lie in what was searched before."""


class EventTooLarge(Exception):
    """One event outgrew the configured bound."""


class EventSplitter:
    """Feed chunks, get whole events. Time is linear in the bytes fed, however small the chunks."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._held = bytearray()
        self._searched = 0

    @property
    def holds_bytes(self) -> bool:
        """Whether part of an event is waiting for its rest."""
        return bool(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next chunk, return the events it completes; raises ``EventTooLarge``."""
        held = self._held
        held += data
        events: list[bytes] = []
        if b"\n" not in data and b"\r" not in data:
            # Nothing can end here, and looking for these two is a hundred times faster than looking for an end.
            self._searched = len(held)
            if len(held) > self._max_event_bytes:
                raise EventTooLarge
            return events
        start = 0
        for match in _EVENT_END.finditer(held, max(0, self._searched - _LONGEST_SPLIT_END)):
            events.append(bytes(held[start : match.end()]))
            start = match.end()
        del held[:start]
        self._searched = len(held)
        if len(held) > self._max_event_bytes:
            raise EventTooLarge
        return events

    def flush(self) -> bytes:
        """Return what is left at the end of the stream: an event without its final empty line, or nothing."""
        rest = bytes(self._held)
        self._held.clear()
        self._searched = 0
        return rest


def event_data(event: bytes) -> bytes:
    """Return the event's data: its ``data:`` lines joined by newlines, empty for comments and the like."""
    values = (_data_value(line) for line, _ in _lines(event))
    return b"\n".join(value for value in values if value is not None)


def replace_data(event: bytes, data: bytes) -> bytes:
    """Return the event with other data; every other line, and how lines begin and end, stay as they were.

    The new data stands where the last data line stood. In the place of an earlier one, taking out the others might bring
    a CR and an LF together, and two line ends would become one.
    """
    lines = _lines(event)
    out = [event[: _start_of_text(event)]]
    last = max((number for number, (line, _) in enumerate(lines) if _data_value(line) is not None), default=None)
    for number, (line, line_end) in enumerate(lines):
        if number == last:
            new = data.split(b"\n")
            begin = b"data: " if line[5:6] == b" " or any(text.startswith(b" ") for text in new) else b"data:"
            out += ((line_end or b"\n").join(begin + text for text in new), line_end)
        elif _data_value(line) is None:
            out += (line, line_end)
    return b"".join(out)


def _start_of_text(event: bytes) -> int:
    """Return where the text starts; only before the first line is a byte order mark one."""
    return len(_BYTE_ORDER_MARK) if event.startswith(_BYTE_ORDER_MARK) else 0


def _lines(event: bytes) -> list[tuple[bytes, bytes]]:
    """Return every line with its end; the last end may be empty."""
    lines = event[_start_of_text(event) :].splitlines(keepends=True)
    return [(text := line.rstrip(b"\r\n"), line[len(text) :]) for line in lines]


def _data_value(line: bytes) -> bytes | None:
    if line == b"data":
        return b""
    if not line.startswith(b"data:"):
        return None
    return line[6:] if line[5:6] == b" " else line[5:]
