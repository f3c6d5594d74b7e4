"""What one process shares between its exchanges: the store, what is known of the pool, and releases in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog

from extproc import __version__
from extproc.admission import Load
from extproc.debug_state import snapshot
from extproc.errors import ConfigError
from extproc.events import Call, Keep, LearnBlockSize, Leg, Release, Restore
from extproc.log import turn_facts
from extproc.metrics import (
    BODY_BYTES,
    PREPARING,
    PROMPT_IDS_DIFFER,
    RELEASES_WAITING,
    RETURN_LEASES,
    STORE_UP,
    TASKS,
    Metrics,
)
from extproc.policy import returns_early
from extproc.pool import PoolKnowledge
from extproc.receipt import Reason
from extproc.releases import ReleaseQueue
from extproc.retention import Retention
from extproc.returns import ReturnPorts, ReturnQueue
from extproc.store import KEPT, NOT_RELEASED, Dropped, MemoryStore, ReturnedTurn, StoredTurn, fate

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Awaitable, Callable

    from extproc.events import LegResult
    from extproc.http_exchange import HttpExchange
    from extproc.identity import ConversationKey
    from extproc.receipt import Receipt
    from extproc.redis_store import RedisStore
    from extproc.settings import GatewaySettings
    from extproc.tracing import Tracing
    from extproc.workers_client import WorkersClient

RELEASE_TIMEOUT_SECONDS: Final = 10.0
_EXPIRY_INTERVAL_SECONDS: Final = 1.0
_RESTART_AFTER_SECONDS: Final = 1.0
RECENT_TURNS: Final = 100
_WARNINGS: Final = 1000
_WORKER_REMEMBERED_SECONDS: Final = 300.0
RETURNED_REMEMBERED: Final = 2000
"""Conversations whose turn P has read back, the newest. One forgotten finds P's cache all the same; its receipt does not say so."""

_T = TypeVar("_T")

log = structlog.get_logger()


class Store(Protocol):
    """Where turns wait for their next. What is in this process answers at once, what is elsewhere in a future.

    Cancel a future nobody waits for any more: what it would have brought is released.
    """

    def take(self, key: ConversationKey) -> StoredTurn | Reason | Future[StoredTurn | Reason | None] | None:
        """Remove and return the conversation's turn, None if there is none, or the reason why it cannot be had."""

    def put(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped] | Future[list[Dropped]]:
        """Keep ``turn``; return what will not be used because of it, ``turn`` itself if it was not kept.

        Once this is answered, whichever process asks next finds the turn.
        """

    def restore(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped] | Future[list[Dropped]]:
        """Keep a taken turn again, unless something newer is kept by now: then return it."""

    def find_engines(self, name: str) -> list[str]:
        """Return the ids of known engines by an engine id, or the ``host`` or ``host:port`` of their handles."""

    def discard_engine(self, engine_id: str, reason: str = "engine_gone") -> list[Dropped]:
        """Remove and return every turn an engine holds, where that is known."""

    def expire(self, now: float) -> list[Dropped]:
        """Remove and return every turn whose deadline has come."""

    def drain(self) -> list[Dropped]:
        """Remove and return every turn that would be lost with this process."""


class Gateway:
    """The state one process shares between its exchanges, and the means to perform their effects."""

    def __init__(self, settings: GatewaySettings, client: WorkersClient, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.tracing = tracing
        self.recent: deque[tuple[float, Receipt]] = deque(maxlen=RECENT_TURNS)
        self.pool = PoolKnowledge()
        self.load = Load()
        # Empty, and free, where a store is shared.
        self.own_store = MemoryStore(
            max_conversations=settings.store_max_conversations, max_bytes=settings.store_max_bytes
        )
        self.metrics = Metrics(self.own_store)
        self.shared_store: RedisStore | None = None
        if settings.store_url is not None:
            self.shared_store = connect_shared_store(settings, self.metrics, self._release_dropped)
        self.store: Store = self.shared_store or self.own_store
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
        self._prefill_workers: dict[str, float] = {}
        self._returned: OrderedDict[ConversationKey, ReturnedTurn] = OrderedDict()
        ports = ReturnPorts(
            self._call_own,
            self._is_p_busy,
            self._claim,
            self._note_returned,
            self._release_refused,
            self._release_unread,
            self.metrics.returned,
        )
        self._returns = ReturnQueue(settings, ports)
        self.metrics.watch(RETURN_LEASES, lambda: self._returns.leased_tokens)
        self.metrics.watch(RELEASES_WAITING, self._releases.__len__)
        self.metrics.watch(TASKS, lambda: len(asyncio.all_tasks()))
        self.metrics.watch(STORE_UP, lambda: self.shared_store is None or self.shared_store.is_up)
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
            self._prefill_workers[result.upstream] = result.at
        self.metrics.leg(call, result)
        return result

    async def _call_own(self, call: Call) -> LegResult:
        result = await self._client.call_own(call)
        self.metrics.leg(call, result)
        return result

    def take(
        self, key: ConversationKey
    ) -> StoredTurn | ReturnedTurn | Reason | Future[StoredTurn | Reason | None] | None:
        """Remove and return what is kept for a conversation, at once or in a future."""
        taken = self._timed("take", lambda: self.store.take(key))
        self.retention.ledger.taken(key, time.monotonic())
        returned = self._returned.pop(key, None)
        return returned if taken is None else taken

    def keep(self, keep: Keep | Restore) -> list[Dropped] | Future[list[Dropped]]:
        """Keep a turn, or keep it again; tell ``kept`` what comes of it."""
        store = self.store.put if isinstance(keep, Keep) else self.store.restore
        return self._timed("put", lambda: store(keep.key, keep.turn))

    def kept(self, keep: Keep | Restore, dropped: list[Dropped]) -> str:
        """Release what a turn displaced, and return its own fate."""
        self._release_dropped(dropped)
        became = fate(keep.turn, dropped)
        if became == KEPT and keep.turn.handle.engine_id in self.pool.draining_engines and self.shared_store is None:
            # It was taken while its engine began to drain, and has come back.
            self._let_go([keep.key], "engine_draining")
            return "engine_draining"
        if became == KEPT and self.shared_store is None:
            self.retention.kept(keep, keep.upstream_address if isinstance(keep, Keep) else None)
            if isinstance(keep, Keep) and keep.returning is not None:
                self._return_early(keep)
        return became

    def _return_early(self, keep: Keep) -> None:
        ledger, now = self.retention.ledger, time.monotonic()
        pressure = ledger.under_pressure(keep.turn.handle.engine_id)
        if returns_early(self.settings.return_mode, chance=ledger.chance(keep.key, now), d_under_pressure=pressure):
            self._returns.add(keep)

    def _is_p_busy(self) -> bool:
        # A worker's address is new with every start; those not heard of for a while are gone.
        oldest = time.monotonic() - _WORKER_REMEMBERED_SECONDS
        self._prefill_workers = {worker: at for worker, at in self._prefill_workers.items() if at > oldest}
        return self._prefilling >= max(1, len(self._prefill_workers))

    def _claim(self, key: ConversationKey, turn: StoredTurn) -> bool:
        """Take a turn out of the store to return it, unless a next turn has it or has replaced it."""
        found = self.own_store.take(key)
        if found is None:
            return False
        if found.handle.raw != turn.handle.raw:
            self.own_store.restore(key, found)
            return False
        if found.deadline <= time.monotonic():
            # It waited too long for P: D may have let go of it by the time P reads.
            self._release_dropped([Dropped(found, "expired", key)])
            return False
        self.retention.ledger.returned(key)
        return True

    def _note_returned(self, key: ConversationKey, returned: ReturnedTurn | None) -> None:
        self._returned.pop(key, None)
        if returned is not None:
            self._returned[key] = returned
            if len(self._returned) > RETURNED_REMEMBERED:
                self._returned.popitem(last=False)

    def _release_refused(self, turn: StoredTurn) -> None:
        self.release(Release(turn.handle, turn.model, "refused"))

    def _release_unread(self, turn: StoredTurn) -> None:
        self.release(Release(turn.handle, turn.model, "read_failed", self.settings.reuse_timeout_seconds))

    async def end_conversation(self, key: ConversationKey) -> bool | Reason:
        """Release what is kept for a conversation; False if nothing is, a reason if that cannot be known."""
        taken = self.store.take(key)
        if isinstance(taken, asyncio.Future):
            taken = await taken
        self.retention.ledger.dropped(key)
        if not isinstance(taken, StoredTurn):
            return taken or False
        self._release_dropped([Dropped(taken, "ended")])
        return True

    def _let_go(self, keys: list[ConversationKey], reason: str) -> None:
        """Release what this process keeps for these conversations."""
        turns = [turn for key in keys if (turn := self.own_store.take(key)) is not None]
        for key in keys:
            self.retention.ledger.dropped(key)
        self._release_dropped([Dropped(turn, reason) for turn in turns])

    def drain_engine(self, name: str) -> dict[str, int]:
        """Release all that decode engines known by ``name`` retain, now and from now on; turns released by engine id."""
        released = {}
        for engine_id in self.store.find_engines(name):
            self.pool.draining_engines.add(engine_id)
            dropped = self.store.discard_engine(engine_id, "engine_draining")
            self._release_dropped(dropped)
            released[engine_id] = len(dropped)
        return released

    def _timed(self, operation: str, ask: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        answer = ask()
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda _: self.metrics.store_operation(operation, time.perf_counter() - started))
        else:
            self.metrics.store_operation(operation, time.perf_counter() - started)
        return answer

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
            "shared_store": self.shared_store is not None,
            **snapshot(self.settings, self.pool, self.own_store, self.recent, now=now, limit=limit),
        }

    # --- in the background ------------------------------------------------------------------------------------------

    async def run_background(self) -> None:
        """Expire kept turns, keep to the budget and perform releases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._expire_for_ever, self._releases.run, self.retention.run, self._returns.run):
                tasks.create_task(_run_for_ever(work))
            if self.shared_store is not None:
                tasks.create_task(_run_for_ever(self.shared_store.run))

    async def release_everything(self) -> None:
        """Queue a release for every turn kept in this process alone, and wait until the queue is empty."""
        self._release_dropped(self.store.drain())
        await self._releases.finish()

    def _release_dropped(self, dropped: list[Dropped]) -> None:
        for drop in dropped:
            self.metrics.dropped(drop.reason)
            if drop.key is not None:
                self.retention.ledger.dropped(drop.key)
            if drop.reason not in NOT_RELEASED:
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
            self._release_dropped(self._expire(now))

    def _expire(self, now: float) -> list[Dropped]:
        return self._timed("expire", lambda: self.store.expire(now))

    def _run_errand(self, errand: Any) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _learn_block_size(self, wanted: LearnBlockSize) -> None:
        load = await self._client.engine_load(wanted.upstream_address)
        tokens = None if load is None else load.block_size_tokens
        if tokens is None:
            if self._is_news(wanted.engine_id):
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


def connect_shared_store(
    settings: GatewaySettings, metrics: Metrics, release: Callable[[list[Dropped]], None]
) -> RedisStore:
    """Return the store behind ``KVLOOP_STORE_URL``; raises ``ConfigError``. Only then is redis-py needed."""
    try:
        from extproc.redis_store import RedisStore  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigError("KVLOOP_STORE_URL needs redis-py: pip install '.[redis]' in a checkout") from None
    return RedisStore(settings, metrics, release)
