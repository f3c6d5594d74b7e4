"""What one process shares between its exchanges: the store, what is known of the pool, and releases in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from extproc import __version__
from extproc.admission import Load
from extproc.debug_state import snapshot
from extproc.events import Call, Keep, LearnBlockSize, Leg, Release, Restore
from extproc.log import turn_facts
from extproc.metrics import (
    BODY_BYTES,
    PREPARING,
    PROMPT_IDS_DIFFER,
    RELEASES_WAITING,
    RETURN_LEASES,
    TASKS,
    Metrics,
)
from extproc.policy import returns_early
from extproc.pool import PoolKnowledge
from extproc.receipt import Reason
from extproc.releases import ReleaseQueue
from extproc.retention import Retention
from extproc.returns import ReturnPorts, ReturnQueue
from extproc.store import Dropped, MemoryStore, ReturnedTurn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from extproc.events import LegResult
    from extproc.http_exchange import HttpExchange
    from extproc.identity import ConversationKey
    from extproc.receipt import Receipt
    from extproc.settings import GatewaySettings
    from extproc.store import StoredTurn
    from extproc.tracing import Tracing
    from extproc.workers_client import WorkersClient

RELEASE_TIMEOUT_SECONDS: Final = 10.0
_EXPIRY_INTERVAL_SECONDS: Final = 1.0
_RESTART_AFTER_SECONDS: Final = 1.0
RECENT_TURNS: Final = 100
_WARNINGS: Final = 1000
RETURNED_REMEMBERED: Final = 2000
"""Conversations whose turn P has read back, the newest. One forgotten finds P's cache all the same; its receipt does not say so."""

log = structlog.get_logger()


class Gateway:
    """The state one process shares between its exchanges, and the means to perform their effects."""

    def __init__(self, settings: GatewaySettings, client: WorkersClient, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.tracing = tracing
        self.recent: deque[tuple[float, Receipt]] = deque(maxlen=RECENT_TURNS)
        self.pool = PoolKnowledge()
        self.load = Load()
        self.store = MemoryStore(max_conversations=settings.store_max_conversations, max_bytes=settings.store_max_bytes)
        self.metrics = Metrics(self.store)
        self._client = client
        self._releases = ReleaseQueue(
            self._send_release, self.metrics.released, per_second=settings.releases_per_second
        )
        self.retention = Retention(
            settings,
            self.pool,
            client,
            let_go=lambda keys: self._let_go(keys, "over_budget"),
            leaving_tokens=self._releases.tokens_of,
        )
        self._prefilling = 0
        self._prefill_workers: set[str] = set()
        self._returned: OrderedDict[ConversationKey, ReturnedTurn] = OrderedDict()
        ports = ReturnPorts(
            self._call_own,
            self._is_p_busy,
            self._claim,
            self._note_returned,
            self._release_refused,
            self.metrics.returned,
        )
        self._returns = ReturnQueue(settings, ports)
        self.metrics.watch(RETURN_LEASES, lambda: self._returns.leased_tokens)
        self.metrics.watch(RELEASES_WAITING, self._releases.__len__)
        self.metrics.watch(TASKS, lambda: len(asyncio.all_tasks()))
        self.metrics.watch(PROMPT_IDS_DIFFER, lambda: self.pool.prompt_ids_differed)
        self.metrics.watch(PREPARING, lambda: self.load.preparing)
        self.metrics.watch(BODY_BYTES, lambda: self.load.body_bytes)
        self._errands: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()
        levels = logging.getLevelNamesMapping()
        self._turn_level = levels[settings.turn_log_level.upper()]
        self._logs_turns = self._turn_level >= levels[settings.log_level.upper()]

    async def call(self, call: Call) -> LegResult:
        """Perform a leg."""
        is_prefill = call.leg is Leg.PREFILL
        self._prefilling += is_prefill
        try:
            result = await self._client.call(call)
        finally:
            self._prefilling -= is_prefill
        if is_prefill and result.upstream:
            self._prefill_workers.add(result.upstream)
        self.metrics.leg(call, result)
        return result

    async def _call_own(self, call: Call) -> LegResult:
        result = await self._client.call_own(call)
        self.metrics.leg(call, result)
        return result

    def take(self, key: ConversationKey) -> StoredTurn | ReturnedTurn | None:
        """Remove and return what is kept for a conversation."""
        with self._timed("take"):
            turn = self.store.take(key)
        self.retention.ledger.taken(key, time.monotonic())
        returned = self._returned.pop(key, None)
        return returned if turn is None else turn

    def keep(self, keep: Keep) -> None:
        """Keep a turn, and release what it displaces."""
        with self._timed("put"):
            dropped = self.store.put(keep.key, keep.turn)
        self._note_kept(keep, dropped, keep.upstream_address)

    def restore(self, restore: Restore) -> None:
        """Keep a taken turn again, or release it if its place is lost."""
        self._note_kept(restore, self.store.restore(restore.key, restore.turn))

    def _note_kept(self, keep: Keep | Restore, dropped: list[Dropped], address: str | None = None) -> None:
        self._release_dropped(dropped)
        if all(drop.turn is not keep.turn for drop in dropped):
            self.retention.kept(keep, address)
            if isinstance(keep, Keep) and keep.returning is not None:
                self._return_early(keep)

    def _return_early(self, keep: Keep) -> None:
        ledger, now = self.retention.ledger, time.monotonic()
        pressure = ledger.under_pressure(keep.turn.handle.engine_id)
        if returns_early(self.settings.return_mode, chance=ledger.chance(keep.key, now), d_under_pressure=pressure):
            self._returns.add(keep)

    def _is_p_busy(self) -> bool:
        return self._prefilling >= max(1, len(self._prefill_workers))

    def _claim(self, key: ConversationKey, turn: StoredTurn) -> bool:
        """Take a turn out of the store to return it, unless a next turn has it or has replaced it."""
        found = self.store.take(key)
        if found is not None and found.handle.raw != turn.handle.raw:
            self.store.restore(key, found)
            found = None
        if found is not None:
            self.retention.ledger.returned(key)
        return found is not None

    def _note_returned(self, key: ConversationKey, returned: ReturnedTurn | None) -> None:
        self._returned.pop(key, None)
        if returned is not None:
            self._returned[key] = returned
            if len(self._returned) > RETURNED_REMEMBERED:
                self._returned.popitem(last=False)

    def _release_refused(self, turn: StoredTurn) -> None:
        self.release(Release(turn.handle, turn.model, "refused"))

    def end_conversation(self, key: ConversationKey) -> bool:
        """Release what is kept for a conversation; False if nothing is."""
        return self._let_go([key], "ended")

    def _let_go(self, keys: list[ConversationKey], reason: str) -> bool:
        """Release what is kept for these conversations; False if nothing is."""
        turns = [turn for key in keys if (turn := self.store.take(key)) is not None]
        for key in keys:
            self.retention.ledger.dropped(key)
        self._release_dropped([Dropped(turn, reason) for turn in turns])
        return bool(turns)

    def drain_engine(self, name: str) -> dict[str, int]:
        """Release all that decode engines known by ``name`` retain, now and from now on; turns released by engine id."""
        released = {}
        for engine_id in self.store.find_engines(name):
            self.pool.draining_engines.add(engine_id)
            dropped = self.store.discard_engine(engine_id, "engine_draining")
            self._release_dropped(dropped)
            released[engine_id] = len(dropped)
        return released

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.store_operation(operation, time.perf_counter() - started)

    def learn_block_size(self, wanted: LearnBlockSize) -> None:
        """Find out a block size in the background."""
        self._run_errand(self._learn_block_size(wanted))

    def finished(self, exchange: HttpExchange, *, trace_id: str | None = None) -> None:
        """Count an exchange out, and say what somebody should know of it."""
        receipt = exchange.receipt
        self.recent.append((time.monotonic(), receipt))
        self.metrics.finished(receipt)
        if receipt.reason is Reason.PROMPT_IDS_DIFFER:
            log.error(
                "prompt_ids_differed",
                reuse_off=self.pool.prompt_ids_differed,
                fix="P ignores kv_transfer_params.prompt_token_ids: check its vLLM version, then restart the gateway",
            )
        if receipt.refused_host is not None and self._is_news(receipt.refused_host):
            is_loopback = receipt.captured == "loopback_host"
            log.warning(
                "handle_with_loopback_host" if is_loopback else "handle_with_foreign_host",
                host=receipt.refused_host,
                fix="set VLLM_NIXL_SIDE_CHANNEL_HOST on D to an address P can reach, or KVLOOP_SINGLE_HOST=true"
                if is_loopback
                else "if a decode worker lives there, add it to KVLOOP_HANDLE_HOSTS; if not, find out who answers in its place",
            )
        if self._logs_turns:
            log.log(self._turn_level, "turn_finished", **turn_facts(exchange, trace_id))

    def _is_news(self, what: str) -> bool:
        """Whether this was not warned of before; there is an end to it, whatever a worker makes up."""
        if what in self._warned or len(self._warned) >= _WARNINGS:
            return False
        self._warned.add(what)
        return True

    def state(self, limit: int) -> dict[str, Any]:
        """Describe what is going on, for ``/debug/state``."""
        now = time.monotonic()
        return {
            "version": __version__,
            **snapshot(self.settings, self.pool, self.store, self.recent, now=now, limit=limit),
        }

    # --- in the background ------------------------------------------------------------------------------------------

    async def run_background(self) -> None:
        """Expire kept turns, keep to the budget and perform releases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._expire_for_ever, self._releases.run, self.retention.run, self._returns.run):
                tasks.create_task(_run_for_ever(work))

    async def release_everything(self) -> None:
        """Queue a release for every kept turn, and wait until the queue is empty."""
        self._release_dropped(self.store.drain())
        await self._releases.finish()

    def _release_dropped(self, dropped: list[Dropped]) -> None:
        for drop in dropped:
            self.metrics.dropped(drop.reason)
            if drop.key is not None:
                self.retention.ledger.dropped(drop.key)
            if drop.reason != "engine_gone":
                self.release(Release(drop.turn.handle, drop.turn.model, drop.reason))

    def release(self, release: Release) -> None:
        """Have D free a handle's blocks, in the background."""
        if release.after_seconds:
            # Lost if the gateway stops first; then D's own TTL frees them.
            now = replace(release, after_seconds=0.0)
            asyncio.get_running_loop().call_later(release.after_seconds, self._releases.add, now)
        else:
            self._releases.add(release)

    async def _send_release(self, release: Release) -> bool:
        return await self._client.release(release, RELEASE_TIMEOUT_SECONDS)

    async def _expire_for_ever(self) -> None:
        while True:
            wanted = time.monotonic() + _EXPIRY_INTERVAL_SECONDS
            await asyncio.sleep(_EXPIRY_INTERVAL_SECONDS)
            now = time.monotonic()
            self.metrics.loop_lag(now - wanted)
            with self._timed("expire"):
                dropped = self.store.expire(now)
            self._release_dropped(dropped)

    def _run_errand(self, errand: Any) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _learn_block_size(self, wanted: LearnBlockSize) -> None:
        load = await self._client.engine_load(wanted.upstream_address)
        tokens = None if load is None else load.block_size_tokens
        if tokens is None:
            if wanted.engine_id not in self._warned:
                self._warned.add(wanted.engine_id)
                log.warning(
                    "block_size_unknown",
                    worker=wanted.upstream_address,
                    fix="set KVLOOP_DECODE_BLOCK_SIZE_TOKENS; until then handles of this worker are not used",
                )
            return
        self.pool.learn_block_size(wanted.engine_id, tokens)


async def _run_for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until cancelled. A fault in it is logged and ends neither it for good nor what runs beside it."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("background_failed")
        await asyncio.sleep(_RESTART_AFTER_SECONDS)
