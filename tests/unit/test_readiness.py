"""A replica is ready when it has reached Envoy's prefill listener; how long it takes to lose it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from extproc import readiness as module
from extproc.readiness import Readiness


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.01)


def test_it_waits_for_the_listener_loses_it_and_finds_it_again_but_serves_from_the_first_time_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.02)

    async def run() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        readiness = Readiness(f"http://127.0.0.1:{port}")
        times_reached = 0

        def reached() -> None:
            nonlocal times_reached
            times_reached += 1

        watching = asyncio.create_task(readiness.watch(reached))
        await asyncio.sleep(0.3)
        assert readiness.obstacle() is not None
        assert times_reached == 0
        for _ in range(2):
            server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
            await until(lambda: readiness.obstacle() is None)
            server.close()
            await until(lambda: readiness.obstacle() is not None)
        assert times_reached == 1
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(run())


def test_a_listener_that_is_not_reached_from_the_start_on_is_told_once_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)

    async def run() -> int:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = int(server.sockets[0].getsockname()[1])
        server.close()
        watching = asyncio.create_task(Readiness(f"http://127.0.0.1:{port}").watch(lambda: None))
        await until(lambda: bool(logs))
        await asyncio.sleep(0.5)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return port

    with capture_logs() as logs:
        port = asyncio.run(run())
    (told,) = logs
    assert (told["log_level"], told["event"], told["port"]) == ("warning", "prefill_listener_not_reached", port)
    assert "KVLOOP_PREFILL_URL" in told["fix"]


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://envoy", "envoy:80"), ("https://envoy", "envoy:443"), ("http://[::1]:10001", "::1:10001")],
)
def test_the_address_is_the_url_s(url: str, address: str) -> None:
    assert f" {address} " in str(Readiness(url).obstacle())
