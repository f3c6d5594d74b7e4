"""What runs in the background goes on after a fault: else handles would neither expire nor be released, and nobody would know."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from extproc import gateway as gateway_module
from extproc.gateway import Gateway
from extproc.settings import GatewaySettings


@pytest.mark.parametrize("where", ["expiry", "releases", "retention", "returns"])
def test_a_fault_in_the_background_ends_neither_it_nor_the_rest(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def run() -> None:
        monkeypatch.setattr(gateway_module, "_EXPIRY_INTERVAL_SECONDS", 0.001)
        monkeypatch.setattr(gateway_module, "_RESTART_AFTER_SECONDS", 0.001)
        served = Gateway(GatewaySettings(), None)  # type: ignore[arg-type]
        ran = {name: asyncio.Event() for name in ("expiry", "releases", "retention", "returns")}
        failed: set[str] = set()

        def note(name: str) -> None:
            if name == where and name not in failed:
                failed.add(name)
                raise RuntimeError("a fault")
            ran[name].set()

        def expire(_: float) -> list[Any]:
            note("expiry")
            return []

        async def work(name: str) -> None:
            note(name)
            await asyncio.Event().wait()

        monkeypatch.setattr(served.store, "expire", expire)
        monkeypatch.setattr(served._releases, "run", lambda: work("releases"))
        monkeypatch.setattr(served.retention, "run", lambda: work("retention"))
        monkeypatch.setattr(served._returns, "run", lambda: work("returns"))
        background = asyncio.create_task(served.run_background())
        async with asyncio.timeout(30):
            for event in ran.values():
                await event.wait()
        assert failed == {where}
        assert not background.done()
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background

    asyncio.run(run())
