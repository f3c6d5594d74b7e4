"""The least HTTP/1.1 client that can time a streamed answer: one request after the other on each connection.

It keeps what arrived and when, and looks inside only to find where the answer ends; what the answer says is worked out
after its last byte. So it costs a few microseconds per chunk, and the load generator is not what is measured.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_END_OF_CHUNKS: Final = b"0\r\n\r\n"
_EVENT: Final = b"data: {"


class Answer:
    """One answer. Times are seconds of ``time.perf_counter``; an event is one ``data:`` line of JSON."""

    __slots__ = ("broken", "ended_at", "event_times", "first_event_at", "head", "reads", "sent_at", "status")

    def __init__(self) -> None:
        self.status = 0
        self.head = b""
        self.reads: list[bytes] = []
        self.event_times: list[tuple[float, int]] = []
        """When a read brought events, and how many."""
        self.sent_at = 0.0
        self.first_event_at: float | None = None
        self.ended_at = 0.0
        self.broken = ""

    def header(self, name: bytes) -> bytes | None:
        """Return a header of the answer."""
        found = re.search(rb"\r\n" + re.escape(name) + rb": *([^\r\n]*)", self.head, re.IGNORECASE)
        return found[1] if found else None

    def body(self) -> bytes:
        """Return the body without the transfer's chunk marks."""
        raw = b"".join(self.reads)
        return b"".join(_unchunked(raw)) if _CHUNKED.search(self.head) else raw


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self, count_events: Callable[[int], None]) -> None:
        self._count_events = count_events
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._missing: int | None = None
        self._tail = b""

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._transport = transport  # type: ignore[assignment] # a stream's transport can write

    async def send(self, request: bytes) -> Answer:
        """Send a whole request and return its answer, read to its end (or to where it broke)."""
        assert self._transport is not None  # noqa: S101 - connected
        answer = self._answer = Answer()
        self._done = asyncio.get_running_loop().create_future()
        self._missing, self._tail = None, b""
        answer.sent_at = time.perf_counter()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._answer = self._done = None
        return answer

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what arrived."""
        now = time.perf_counter()
        answer = self._answer
        if answer is None:
            return
        if not answer.status:
            data = self._read_head(answer, data)
        if not data:
            self._end_if_over(answer, now)
            return
        answer.reads.append(data)
        events = data.count(_EVENT)
        if events:
            answer.event_times.append((now, events))
            if answer.first_event_at is None:
                answer.first_event_at = now
            self._count_events(events)
        if self._missing is None:
            self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
        else:
            self._missing -= len(data)
        self._end_if_over(answer, now)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a running answer as broken."""
        self._transport = None
        if self._answer is not None:
            self._answer.broken = repr(exc) if exc else "closed"
            self._finish(self._answer, time.perf_counter())

    def _read_head(self, answer: Answer, data: bytes) -> bytes:
        """Return what of ``data`` belongs to the body."""
        answer.head += data
        head, found, rest = answer.head.partition(b"\r\n\r\n")
        if not found:
            return b""
        answer.head = head
        status = _STATUS.match(head)
        answer.status = int(status[1]) if status else -1
        length = _LENGTH.search(head)
        self._missing = int(length[1]) if length else None
        return rest

    def _end_if_over(self, answer: Answer, now: float) -> None:
        if answer.status and (self._missing == 0 or self._tail == _END_OF_CHUNKS):
            self._finish(answer, now)

    def _finish(self, answer: Answer, now: float) -> None:
        answer.ended_at = now
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Connections:
    """A pool of connections to one address. ``events`` counts the events that arrived on all of them."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.events = 0
        self._idle: list[Connection] = []

    async def send(self, request: bytes) -> Answer:
        """Send a request on an idle connection or a new one."""
        connection = None
        while self._idle and connection is None:
            candidate = self._idle.pop()
            connection = candidate if candidate.is_open else None
        try:
            if connection is None:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(lambda: Connection(self._count), self.host, self.port)
            answer = await connection.send(request)
        except OSError as error:
            answer = Answer()
            answer.broken = repr(error)
            answer.ended_at = time.perf_counter()
            return answer
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()

    def _count(self, events: int) -> None:
        self.events += events


def post(host: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return a POST request, ready to be sent."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _unchunked(raw: bytes) -> list[bytes]:
    pieces: list[bytes] = []
    at = 0
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            return pieces
        size = int(raw[at:line_end].partition(b";")[0] or b"0", 16)
        if not size:
            return pieces
        start = line_end + 2
        pieces.append(raw[start : start + size])
        at = start + size + 2
