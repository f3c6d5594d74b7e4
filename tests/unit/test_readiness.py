"""A replica is ready when it has reached Envoy's prefill listener; how long it takes to lose it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

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


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://envoy", "envoy:80"), ("https://envoy", "envoy:443"), ("http://[::1]:10001", "::1:10001")],
)
def test_the_address_is_the_url_s(url: str, address: str) -> None:
    assert f" {address} " in str(Readiness(url).obstacle())
