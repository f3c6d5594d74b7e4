"""The gRPC server under ``server``: sockets around ``http2``, streams to whoever serves their path, health checks.

HTTP/2 on one address, as ext_proc clusters use it, in plaintext or with TLS. Messages stay bytes; ``wire`` reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final, cast

from grpc_health.v1 import health_pb2

from extproc import http2

if TYPE_CHECKING:
    from collections.abc import Callable
    from ssl import SSLContext

_UNSENT_MAX_BYTES: Final = 1024 * 1024
"""Answers that wait for one connection before no more is read from it."""

KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds until the first question, between questions, and how many without an answer end the connection."""

HEALTH_PATH: Final = b"/grpc.health.v1.Health/Check"


class Status:
    """gRPC's status codes, as far as they are sent."""

    OK: Final = 0
    INVALID_ARGUMENT: Final = 3
    UNIMPLEMENTED: Final = 12
    INTERNAL: Final = 13


class Responder:
    """How a stream's server answers."""

    def __init__(self, protocol: _GrpcProtocol, stream: http2.Stream, headers: http2.Headers) -> None:
        self._protocol = protocol
        self._stream = stream
        self._headers = headers

    def metadata(self, name: str) -> str:
        """Return the last value of the initial metadata called ``name``, empty if there is none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in reversed(self._headers) if key == wanted), "")

    def send(self, message: bytes) -> bool:
        """Send a message; False: wait for ``writable`` before you send more."""
        went = self._protocol.connection.send_message(self._stream, message)
        self._protocol.flush_soon()
        return went

    def finish(self, status: int, text: str = "") -> None:
        """End the stream."""
        self._protocol.connection.finish(self._stream, status, text)
        self._protocol.flush_soon()

    def consumed(self, message: bytes) -> None:
        """Note that a received message has been worked off."""
        self._protocol.connection.consumed(self._stream, message)


class GrpcServer:
    """Serves streams by path. ``is_serving`` is what health checks are told."""

    def __init__(
        self, services: dict[bytes, Callable[[Responder], http2.StreamEvents]], *, max_message_bytes: int
    ) -> None:
        self.is_serving = False
        self.max_message_bytes = max_message_bytes
        self.services: dict[bytes, Callable[[Responder], http2.StreamEvents]] = {**services, HEALTH_PATH: self._health}
        self._protocols: set[_GrpcProtocol] = set()
        self._server: asyncio.Server | None = None
        self._accepting: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()

    async def start(self, host: str, port: int, *, ssl: SSLContext | None = None) -> None:
        """Listen, with TLS if there is a context for it; raises ``OSError``."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _GrpcProtocol(self), host, port, ssl=ssl)
        self.is_serving = True

    def accept(self, connection: socket.socket, *, ssl: SSLContext | None = None) -> None:
        """Serve a connection somebody else has accepted."""
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(loop.connect_accepted_socket(lambda: _GrpcProtocol(self), connection, ssl=ssl))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepted)

    def _accepted(self, accepting: asyncio.Task[Any]) -> None:
        self._accepting.discard(accepting)
        if not accepting.cancelled():
            accepting.exception()  # a TLS handshake that failed is its peer's affair

    async def stop(self, grace_seconds: float) -> None:
        """Take no new streams, let the running ones end in that time, and close."""
        self.is_serving = False
        if self._server is not None:
            self._server.close()
        for protocol in list(self._protocols):
            protocol.connection.shut_down()
            protocol.flush_soon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while any(protocol.connection.streams for protocol in self._protocols):
                    self._idle.clear()
                    await self._idle.wait()
        for protocol in list(self._protocols):
            protocol.close()

    def _health(self, responder: Responder) -> http2.StreamEvents:
        return _Health(self, responder)

    def joined(self, protocol: _GrpcProtocol) -> None:
        """Know a connection."""
        self._protocols.add(protocol)

    def left(self, protocol: _GrpcProtocol) -> None:
        """Forget it."""
        self._protocols.discard(protocol)
        self._idle.set()

    def flushed(self) -> None:
        """Look again whether all streams have ended."""
        self._idle.set()


class _GrpcProtocol(asyncio.Protocol):
    """One connection. What is to be sent is written once per turn of the event loop."""

    def __init__(self, server: GrpcServer) -> None:
        self.connection = http2.Connection(self._open, max_message_bytes=server.max_message_bytes)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._flushes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream's transport can write, though uvloop's does not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_MAX_BYTES)
        _find_vanished_peers(transport.get_extra_info("socket"))
        self._server.joined(self)
        self._flush()

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self.connection.abandon()
        self._server.left(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.connection.receive(data)
        except http2.ConnectionBroken as broken:
            self.connection.go_away(broken.code)
            self.close()
        else:
            self.flush_soon()

    def pause_writing(self) -> None:
        """Take no more from a peer that does not take our answers: they would pile up here."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on, because the answers have left."""
        if self._transport is not None:
            self._transport.resume_reading()

    def flush_soon(self) -> None:
        """Send after everything else that is ready has been done, together with what that adds."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what is left and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flushes = False
        out = self.connection.take_output()
        if out and self._transport is not None:
            self._transport.write(out)
        self._server.flushed()

    def _open(self, stream: http2.Stream, headers: http2.Headers) -> http2.StreamEvents:
        path = next((value for name, value in headers if name == b":path"), b"")
        responder = Responder(self, stream, headers)
        serve = self._server.services.get(path)
        return Refused(responder, Status.UNIMPLEMENTED, "no such method") if serve is None else serve(responder)


def _find_vanished_peers(connection: socket.socket) -> None:
    """Have the kernel ask a silent peer whether it is there, as Envoy's clusters do.

    A machine that vanished says no goodbye; without this its streams, and the handles they hold, would stay for ever.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        # Not every system has all of them, nor calls them so.
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Unary:
    """A call of one message; the answer ends it."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def message_received(self, message: bytes) -> None:
        self._responder.consumed(message)

    def half_closed(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def writable(self) -> None:
        pass


class Refused(_Unary):
    """A stream that ends with an error as soon as it is there."""

    def __init__(self, responder: Responder, status: int, text: str) -> None:
        super().__init__(responder)
        asyncio.get_running_loop().call_soon(responder.finish, status, text)


class _Health(_Unary):
    """``grpc.health.v1.Health/Check``, whatever service it asks for: there is only one."""

    def __init__(self, server: GrpcServer, responder: Responder) -> None:
        super().__init__(responder)
        self._server = server

    def message_received(self, message: bytes) -> None:
        super().message_received(message)
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._server.is_serving else response.NOT_SERVING
        self._responder.send(response(status=status).SerializeToString())
        self._responder.finish(Status.OK)
