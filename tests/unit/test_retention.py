"""The shell around the budget: engines are asked, and what is too much is let go of."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import orjson
from world import BLOCK_SIZE, ENGINE, handle_params

from extproc.events import Keep
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.pool import PoolKnowledge
from extproc.proof import fingerprint
from extproc.retention import Retention
from extproc.settings import GatewaySettings
from extproc.store import StoredTurn
from extproc.worker_metrics import EngineLoad


def keep(number: int, tokens: int = 100) -> Keep:
    handle = read_publication(orjson.dumps(handle_params(tokens))).handle
    turn = StoredTurn(handle, fingerprint([]), BLOCK_SIZE, "m", time.monotonic() + 450)
    return Keep(ConversationKey(bytes([number]) * 16), turn, "later", "10.0.0.7:8200")


def retention(loads: list[EngineLoad | None], gone: list[ConversationKey], **settings: float) -> Retention:
    async def engine_load(address: str) -> EngineLoad | None:
        assert address == "10.0.0.7:8200"
        return loads.pop(0) if len(loads) > 1 else loads[0]

    return Retention(
        GatewaySettings(retain_refresh_seconds=0.001, **settings),  # type: ignore[arg-type]
        PoolKnowledge(),
        SimpleNamespace(engine_load=engine_load),  # type: ignore[arg-type]
        let_go=gone.extend,
        leaving_tokens=lambda _: 0,
    )


def test_a_turn_pins_whole_blocks() -> None:
    gone: list[ConversationKey] = []
    kept = retention([None], gone)
    kept.kept(keep(1, tokens=100))
    assert kept.ledger.engines()[0].tokens == 128


def test_one_turn_too_many_lets_another_go_at_once() -> None:
    gone: list[ConversationKey] = []
    kept = retention([None], gone, retain_max_tokens=300)
    for number in range(3):
        kept.kept(keep(number))
    assert len(gone) == 1


def test_an_engine_that_runs_full_gets_its_memory_back_without_any_turn_ending() -> None:
    gone: list[ConversationKey] = []
    calm, full = EngineLoad(32, 10_000, 0.3, 0), EngineLoad(32, 10_000, 0.95, 0)
    kept = retention([calm, full], gone)
    kept.kept(keep(1), "10.0.0.7:8200")

    async def run() -> None:
        running = asyncio.create_task(kept.run())
        async with asyncio.timeout(30):
            while not gone:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(run())
    assert gone[0] == keep(1).key
    assert kept.ledger.engines()[0].engine_id == ENGINE
