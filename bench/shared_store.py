"""What a turn waits for a shared store, and what the gateway's process spends on it: part of ``kvloop bench store``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bench.statistics import percentiles
from extproc.metrics import Metrics
from extproc.redis_store import RedisStore
from extproc.settings import GatewaySettings
from extproc.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.identity import ConversationKey
    from extproc.store import StoredTurn

ROUNDS: Final = 1_000
AT_ONCE: Final = 32
MILLISECOND: Final = 1e3
MICROSECOND: Final = 1e6


def measure(
    url: str,
    sizes: tuple[int, ...],
    make_turn: Callable[[int, int], StoredTurn],
    make_key: Callable[[int], ConversationKey],
) -> list[dict[str, Any]]:
    """Return, by tokens kept, the latency of put and take in milliseconds, and CPU per pair in microseconds.

    Raises ``ConfigError`` if the store cannot be used.
    """
    return asyncio.run(_measure(url, sizes, make_turn, make_key))


async def _measure(
    url: str,
    sizes: tuple[int, ...],
    make_turn: Callable[[int, int], StoredTurn],
    make_key: Callable[[int], ConversationKey],
) -> list[dict[str, Any]]:
    settings = GatewaySettings(store_url=url, store_timeout_seconds=10.0)
    store = RedisStore(settings, Metrics(MemoryStore(max_conversations=1, max_bytes=1)), lambda _: None)
    await store.open()
    upkeep = asyncio.create_task(store.run())
    try:
        return [await _measure_size(store, tokens, make_turn, make_key) for tokens in sizes]
    finally:
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)


async def _measure_size(
    store: RedisStore,
    tokens: int,
    make_turn: Callable[[int, int], StoredTurn],
    make_key: Callable[[int], ConversationKey],
) -> dict[str, Any]:
    turn = replace(make_turn(tokens, 0), deadline=time.monotonic() + 300)
    row: dict[str, Any] = {"tokens": tokens}
    for at_once in (1, AT_ONCE):
        puts: list[float] = []
        takes: list[float] = []

        async def converse(first: int, step: int, puts: list[float] = puts, takes: list[float] = takes) -> None:
            for number in range(first, ROUNDS, step):
                began = time.perf_counter()
                kept = store.put(make_key(number), turn)
                assert isinstance(kept, asyncio.Future)  # noqa: S101 - the store is up
                await kept
                puts.append(time.perf_counter() - began)
                began = time.perf_counter()
                taken = store.take(make_key(number))
                assert isinstance(taken, asyncio.Future)  # noqa: S101 - as before
                await taken
                takes.append(time.perf_counter() - began)

        began = time.process_time()
        await asyncio.gather(*(converse(first, at_once) for first in range(at_once)))
        cpu_us = (time.process_time() - began) / ROUNDS * MICROSECOND
        row[f"at_once_{at_once}"] = {
            "put_ms": percentiles(puts, scale=MILLISECOND),
            "take_ms": percentiles(takes, scale=MILLISECOND),
            "cpu_us_per_turn": round(cpu_us, 1),
        }
    return row


def rows(measured: list[dict[str, Any]]) -> list[list[str]]:
    """Return the measurements as rows of a table: tokens, how many at once, put p50/p99, take p50/p99, CPU."""
    return [
        [f"{row['tokens']:,}", str(at_once)]
        + [f"{row[f'at_once_{at_once}'][name][part]:.2f}" for name in ("put_ms", "take_ms") for part in ("p50", "p99")]
        + [f"{row[f'at_once_{at_once}']['cpu_us_per_turn']:.0f}"]
        for row in measured
        for at_once in (1, AT_ONCE)
    ]
