"""The gRPC server on real sockets: gRPC's own client finds it to speak gRPC, and a peer that only sends fills no memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc import http2
from extproc.grpc_server import GrpcServer, Responder, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PATIENCE_SECONDS = 60.0
ECHO = "/kvloop.test.Echo/Stream"


class Echo:
    """Sends every message back, and ends when the client has."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder
        self.told: list[str] = []

    def message_received(self, message: bytes) -> None:
        self.responder.consumed(message)
        self.responder.send(message)

    def half_closed(self) -> None:
        self.responder.finish(Status.OK)

    def reset(self) -> None:
        self.told.append("reset")

    def writable(self) -> None:
        self.told.append("writable")


@contextlib.asynccontextmanager
async def serving(served: list[Echo] | None = None) -> AsyncIterator[tuple[GrpcServer, str]]:
    def serve(responder: Responder) -> Echo:
        echo = Echo(responder)
        if served is not None:
            served.append(echo)
        return echo

    server = GrpcServer({ECHO.encode(): serve}, max_message_bytes=1 << 20)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await server.start("127.0.0.1", port)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def on_each_loop(test: Callable[[], Awaitable[None]]) -> Callable[[Any], None]:
    """Run the test on asyncio's own event loop, and on the one we serve on."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def sync(run: Callable[[Any], None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test()

        run(bounded())

    return sync


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for knows of no event
        await asyncio.sleep(0.005)


def echo_call(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(ECHO)()


@on_each_loop
async def test_grpcs_own_client_gets_every_message_back() -> None:
    sent = [b"", b"x", bytes(70_000), b"last"]
    async with serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        for _ in range(2):
            call = echo_call(channel)
            for message in sent:
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK


@on_each_loop
async def test_health_is_told_and_changes() -> None:
    async with serving() as (server, address), grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request, response = health_pb2.HealthCheckRequest(service="whatever"), health_pb2.HealthCheckResponse
        assert (await check(request)).status == response.SERVING
        server.is_serving = False
        assert (await check(request)).status == response.NOT_SERVING


@on_each_loop
async def test_methods_nobody_serves_are_unimplemented() -> None:
    async with serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/no.Such/Method")(b"x")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@on_each_loop
async def test_a_cancelled_call_and_a_lost_connection_reach_whoever_serves_the_stream() -> None:
    served: list[Echo] = []
    async with serving(served) as (_, address):
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [echo_call(channel) for _ in range(2)]
            for call in calls:
                await call.write(b"x")
                await call.read()
            calls[0].cancel()
            # gRPC does not say in which order it opens streams.
            await until(lambda: sorted(echo.told for echo in served) == [[], ["reset"]])
        await until(lambda: [echo.told for echo in served] == [["reset"], ["reset"]])


@on_each_loop
async def test_stopping_waits_for_running_streams_and_takes_no_new_ones() -> None:
    async with serving() as (server, address), grpc.aio.insecure_channel(address) as channel:
        call = echo_call(channel)
        await call.write(b"x")
        assert await call.read() == b"x"
        stopped = asyncio.create_task(server.stop(PATIENCE_SECONDS))
        await until(lambda: not server.is_serving)
        await call.write(b"still served")
        assert await call.read() == b"still served"
        assert not stopped.done()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await stopped
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@on_each_loop
async def test_stopping_does_not_wait_longer_than_it_is_told() -> None:
    served: list[Echo] = []
    async with serving(served) as (server, address), grpc.aio.insecure_channel(address) as channel:
        call = echo_call(channel)
        await call.write(b"x")
        assert await call.read() == b"x"
        await server.stop(0.01)
        await until(lambda: served[0].told == ["reset"])


@on_each_loop
async def test_a_peer_of_another_protocol_is_told_to_go_away_and_cut_off() -> None:
    async with serving() as (_, address):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        goaway = struct.pack("!HBBBLLL", 0, 8, 0x7, 0, 0, 0, http2.PROTOCOL_ERROR)
        assert answer.endswith(goaway)
        writer.close()


@on_each_loop
async def test_a_peer_that_never_reads_is_read_no_further_until_it_does() -> None:
    """Pings want answers; whoever does not take them is not allowed to ask for more."""
    ping = struct.pack("!HBBBL8s", 0, 8, 0x6, 0, 0, b"12345678")
    async with serving() as (server, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.setblocking(False)
            peer.send(http2.PREFACE + struct.pack("!HBBBL", 0, 0, 0x4, 0, 0))
            await until(lambda: len(server._protocols) == 1)
            (protocol,) = server._protocols
            transport = protocol._transport
            assert transport is not None

            async def flood() -> None:
                while transport.is_reading():
                    with contextlib.suppress(BlockingIOError):
                        peer.send(ping * 10_000)
                    await asyncio.sleep(0)

            await flood()
            held = transport.get_write_buffer_size()
            for _ in range(100):
                with contextlib.suppress(BlockingIOError):
                    peer.send(ping * 10_000)
                await asyncio.sleep(0)
            # One read may bring answers for a quarter of a mebibyte more than the mark.
            assert transport.get_write_buffer_size() == held < 2 << 20
            while not transport.is_reading():
                with contextlib.suppress(BlockingIOError):
                    peer.recv(1 << 20)
                await asyncio.sleep(0)


@on_each_loop
async def test_the_kernel_looks_after_silent_peers() -> None:
    """One that vanished without a goodbye would else keep its streams, and the handles they hold, for ever."""
    async with serving() as (server, address):
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: bool(server._protocols))
        (protocol,) = server._protocols
        assert protocol._transport is not None
        connection = protocol._transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 5, 3]
        writer.close()
