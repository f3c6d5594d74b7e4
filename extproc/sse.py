"""Cut a response into server-sent events, on bytes, wherever the network cut it.

A chunk is not an event: one may hold several, or a piece of one, even half a character or half a line end. The splitter
hands out whole events with every byte they came with, so that joining what it hands out gives back the stream.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (line ends CR, LF or CRLF; an empty line dispatches).
"""

from __future__ import annotations

import re
from typing import Final

_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE: Final = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|$)")
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
    return b"\n".join(value for value in map(_data_value, _lines(event)) if value is not None)


def replace_data(event: bytes, data: bytes) -> bytes:
    """Return the event with other data; every other line, and how lines begin and end, stay as they were."""
    out: list[bytes] = []
    pending = data.split(b"\n")
    for match in _LINE.finditer(event):
        line, line_end = match.groups()
        value = _data_value(line)
        if value is None:
            out += (line, line_end)
        elif pending:
            begin = line[: len(line) - len(value)]
            joint = (line_end or b"\n") + begin.removeprefix(_BYTE_ORDER_MARK)
            out += (begin, joint.join(pending), line_end)
            pending = []
    return b"".join(out)


def _lines(event: bytes) -> list[bytes]:
    return [match.group(1) for match in _LINE.finditer(event)]


def _data_value(line: bytes) -> bytes | None:
    line = line.removeprefix(_BYTE_ORDER_MARK)
    if line == b"data":
        return b""
    if not line.startswith(b"data:"):
        return None
    return line[6:] if line[5:6] == b" " else line[5:]
