"""POST requests to one HTTP/1.1 origin on kept connections: the transport of our own legs, and nothing else.

A leg stands between the client and its first token, so what it takes counts: a general client spends five times the
processor time and several turns of the event loop on sessions, redirects, cookies and the like, none of which a leg may
have (docs/performance.md). Responses are parsed by llhttp (the ``httptools`` package).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from extproc.events import Headers

_IDLE_SECONDS: Final = 30.0
"""A connection unused for longer may just be closing on the other side, and a POST must not be sent twice."""

_FINAL: Final = 200
"""Answers below are interim: the one that counts follows."""


@dataclass(slots=True)
class Response:
    """A whole response. Header names are in lower case; of several of one name the last stands."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Origin:
    """The connections to one ``http://host:port`` or ``https://host:port``."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host_line = f"host: {parts.netloc}"
        self._idle: deque[_Connection] = deque()

    async def post(self, path: str, headers: Headers, body: bytes) -> Response:
        """Return the response; raises ``OSError`` if there is none. Cancelled, it drops the connection."""
        lines = [f"POST {path} HTTP/1.1", self._host_line, f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
            raise ValueError("a header holds a line end")
        connection = self._idle_connection() or await self._connect()
        try:
            response = await connection.exchange(head.encode() + b"\r\n\r\n" + body)
        except BaseException:
            connection.drop()
            raise
        if connection.is_open:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            self._drop_old()
        else:
            connection.drop()  # "connection: close" may leave the closing to us
        return response

    def close(self) -> None:
        """Drop the connections that wait for a request."""
        for connection in self._idle:
            connection.drop()
        self._idle.clear()

    def _idle_connection(self) -> _Connection | None:
        """Return the one used last: the others may grow too old, and go."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < _IDLE_SECONDS:
                return connection
            connection.drop()
        return None

    def _drop_old(self) -> None:
        """Let go of what a peak has left behind: the oldest stand first."""
        while self._idle and (
            not self._idle[0].is_open or time.monotonic() - self._idle[0].idle_since >= _IDLE_SECONDS
        ):
            self._idle.popleft().drop()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        self._response = Response()
        self._pieces: list[bytes] = []
        self._ends_with_connection = False

    async def exchange(self, request: bytes) -> Response:
        """Send a request and return its response; raises ``OSError``."""
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ConnectionResetError
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def drop(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport can write, though uvloop's does not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        del self._parser  # they refer to each other
        if self._ends_with_connection and error is None:
            self._finish()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the connection was lost before the answer was whole"))

    # --- what the parser calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():
            # Nobody asked. Kept, it would be taken for the answer to somebody else's request.
            self.drop()
        self._response = Response()
        self._pieces = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        self._ends_with_connection = self._response.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if self._response.status >= _FINAL:
            self.is_open = self.is_open and self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self._response.body = b"".join(self._pieces)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._response)
