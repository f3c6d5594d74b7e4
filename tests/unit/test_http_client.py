"""Legs over HTTP/1.1: however an answer is cut or framed it comes whole, and no answer is ever another request's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from extproc.http_client import Origin, Response

PATIENCE_SECONDS = 60.0
BODY = b'{"a":1}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: 7\r\n\r\n" + BODY

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def read_request(reader: Reader) -> tuple[bytes, bytes]:
    """Return head and body of the next request; raises ``IncompleteReadError`` at the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


class Server:
    """Says to each request, in turn, what the script has; counts connections."""

    def __init__(self, *script: bytes, closes: bool = False, piece_bytes: int = 1 << 30) -> None:
        self.script = list(script)
        self.closes = closes
        self.piece_bytes = piece_bytes
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.lost = asyncio.Event()

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await read_request(reader))
                said = self.script.pop(0) if self.script else b""
                for start in range(0, len(said), self.piece_bytes):
                    writer.write(said[start : start + self.piece_bytes])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


def on_each_loop(test: Callable[..., Awaitable[None]]) -> Any:
    """Run the test on asyncio's own event loop, and on the one we serve on."""

    def run(loop: Callable[[Any], None], *arguments: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test(*arguments)

        loop(bounded())

    return lambda *arguments: [run(loop, *arguments) for loop in (asyncio.run, uvloop.run)]


async def posted(server: Server, times: int = 1, headers: Any = (("x-a", "b"),)) -> list[Response | str]:
    """POST that often, one after the other; what failed comes back as the error's name."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    origin = Origin(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    got: list[Response | str] = []
    for _ in range(times):
        try:
            got.append(await origin.post("/v1/x", headers, b"question"))
        except OSError as error:
            got.append(type(error).__name__)
        await asyncio.sleep(0.01)
    origin.close()
    listener.close()
    return got


ANSWER = Response(200, {"content-type": "application/json", "content-length": "7"}, BODY)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n"
    + BODY[:3]
    + b"\r\n4\r\n"
    + BODY[3:]
    + b"\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 30])
def test_answers_come_whole_however_they_are_cut_and_connections_are_used_again(piece_bytes: int) -> None:
    async def test() -> None:
        server = Server(WHOLE, CHUNKED, WHOLE, piece_bytes=piece_bytes)
        first, second, third = await posted(server, 3)
        assert first == third == ANSWER
        assert isinstance(second, Response)
        assert (second.status, second.body) == (200, BODY)
        assert server.connections == 1

    on_each_loop(test)()


def test_a_request_says_what_it_must_and_carries_its_headers() -> None:
    async def test() -> None:
        server = Server(WHOLE)
        await posted(server, headers=(("x-a", "b"), ("x-a", "ø")))
        ((head, body),) = server.requests
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /v1/x HTTP/1.1"
        assert lines[1].startswith("host: 127.0.0.1:")
        assert lines[2:] == ["content-length: 8", "x-a: b", "x-a: ø", "", ""]
        assert body == b"question"

    on_each_loop(test)()


@pytest.mark.parametrize("bad", ["a\r\nx-evil: 1", "a\nb", "a\rb", "a\0b"])
def test_a_header_cannot_hold_another(bad: str) -> None:
    async def test() -> None:
        server = Server(WHOLE)
        with pytest.raises(ValueError, match="line end"):
            await posted(server, headers=(("x-a", bad),))
        assert server.connections == 0

    on_each_loop(test)()


@pytest.mark.parametrize(
    ("said", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.0 503 Down\r\ncontent-length: 2\r\n\r\nno", 503, b"no"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, 200, BODY),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 7\r\n\r\n" + BODY, 200, BODY),
    ],
)
def test_a_connection_that_ends_with_its_answer_is_not_used_again(said: bytes, status: int, body: bytes) -> None:
    async def test() -> None:
        server = Server(said, said, closes=True)
        for response in await posted(server, 2):
            assert isinstance(response, Response)
            assert (response.status, response.body) == (status, body)
        assert server.connections == 2

    on_each_loop(test)()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        WHOLE[:-1],
        CHUNKED[:-2],
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_half_an_answer_and_no_http_at_all_are_errors(said: bytes) -> None:
    async def test() -> None:
        assert await posted(Server(said, WHOLE, closes=True), 2) in (
            ["ConnectionResetError", "ConnectionResetError"],
            ["ConnectionResetError", ANSWER],
        )

    on_each_loop(test)()


@pytest.mark.parametrize("extra", [WHOLE, WHOLE[:20], b"x"])
@pytest.mark.parametrize("later", [False, True])
def test_an_answer_nobody_asked_for_is_never_another_requests(extra: bytes, later: bool) -> None:
    async def test() -> None:
        wrong = extra.replace(BODY, b'{"a":2}')
        server = Server(WHOLE + (b"" if later else wrong), WHOLE)
        if later:

            async def serve(reader: Reader, writer: Writer) -> None:
                server.connections += 1
                await read_request(reader)
                writer.write(WHOLE)
                await asyncio.sleep(0)
                writer.write(wrong)

            server.serve = serve  # type: ignore[method-assign]
        assert await posted(server, 2) == [ANSWER, ANSWER]
        assert server.connections == 2

    on_each_loop(test)()


def test_a_connection_whose_end_was_announced_is_closed_from_here() -> None:
    async def test() -> None:
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 7\r\n\r\n" + BODY)
            if await reader.read(1) == b"":
                closed.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert (await Origin(f"http://127.0.0.1:{port}").post("/", (), b"{}")).status == 200
        async with asyncio.timeout(10):
            await closed.wait()
        server.close()

    on_each_loop(test)()


def test_what_a_peak_opened_is_closed_after_it() -> None:
    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(2)
                    await asyncio.sleep(0.01)
                    writer.write(WHOLE)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        origin = Origin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await asyncio.gather(*(origin.post("/", (), b"{}") for _ in range(20)))
        assert len(origin._idle) > 1
        for connection in origin._idle:
            connection.idle_since -= 1000
        await origin.post("/", (), b"{}")
        assert len(origin._idle) == 1
        origin.close()
        server.close()

    on_each_loop(test)()


def test_nobody_listening_is_an_error() -> None:
    async def test() -> None:
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await Origin("http://127.0.0.1:1").post("/", (), b"")

    on_each_loop(test)()


def test_a_request_given_up_drops_its_connection() -> None:
    async def test() -> None:
        server = Server()
        asking = asyncio.create_task(posted(server))
        while not server.requests:  # noqa: ASYNC110 - what is waited for knows of no event
            await asyncio.sleep(0.005)
        asking.cancel()
        await server.lost.wait()

    on_each_loop(test)()


def test_many_at_once_have_a_connection_each_and_share_them_later() -> None:
    async def test() -> None:
        server = Server(*[WHOLE] * 20)
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        origin = Origin(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        for _ in range(2):
            got = await asyncio.gather(*(origin.post("/", (), b"") for _ in range(10)))
            assert got == [ANSWER] * 10
        assert server.connections == 10
        origin.close()
        listener.close()

    on_each_loop(test)()


def test_a_connection_idle_for_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server = Server(WHOLE, WHOLE)
        monkeypatch.setattr("extproc.http_client._IDLE_SECONDS", 0.0)
        assert await posted(server, 2) == [ANSWER, ANSWER]
        assert server.connections == 2

    on_each_loop(test)()


@pytest.mark.parametrize(
    ("url", "port", "uses_tls"),
    [("http://h", 80, False), ("https://h", 443, True), ("http://[::1]:81", 81, False)],
)
def test_an_origin_is_read_from_its_url(url: str, port: int, uses_tls: bool) -> None:
    origin = Origin(url)
    assert (origin._port, origin._tls is not None) == (port, uses_tls)
