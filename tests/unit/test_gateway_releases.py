"""The gRPC shell, where no stream is needed to see it fail; streams are tested with the real Envoy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import orjson
from world import handle_params

from extproc.events import LearnBlockSize, Release
from extproc.gateway import Gateway
from extproc.handle import read_publication
from extproc.settings import GatewaySettings


def test_one_release_that_raises_does_not_end_the_others() -> None:

    tried: list[str] = []

    async def release(wanted: Release, _: float) -> bool:
        tried.append(wanted.reason)
        if wanted.reason == "first":
            raise RuntimeError("unforeseen")
        return True

    async def run() -> None:
        gateway = Gateway(GatewaySettings(), SimpleNamespace(release=release))  # type: ignore[arg-type]
        background = asyncio.create_task(gateway.run_background())
        handle = read_publication(orjson.dumps(handle_params(64))).handle
        for reason in ("first", "second"):
            gateway.release(Release(handle, "m", reason))
            await asyncio.sleep(0.05)
        assert not background.done()
        background.cancel()

    asyncio.run(run())
    assert tried == ["first", "second"]


def test_an_unknown_block_size_is_asked_again_and_told_once(capsys) -> None:
    asked: list[str] = []

    async def engine_load(address: str) -> None:
        asked.append(address)

    async def run() -> None:
        gateway = Gateway(GatewaySettings(), SimpleNamespace(engine_load=engine_load))
        for _ in range(3):
            await gateway._learn_block_size(LearnBlockSize("engine", "10.0.0.7:8200"))

    asyncio.run(run())
    assert len(asked) == 3
    assert capsys.readouterr().out.count("block_size_unknown") == 1
