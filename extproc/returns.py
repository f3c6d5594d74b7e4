"""Eager return: right after a turn P reads its KV back from D, so that D is free and the next turn finds it in P's own cache.

A return is a prefill leg nobody waits for. It takes the handle out of the store like a turn would, so the handle is still used
once; until it does, the turn can be had lazily, and if no return comes about, it is. Returns keep out of the way: a few at a
time, only while fewer of the users' prefill legs are under way than there are prefill workers.

P keeps what it prefilled for a decode worker that will never ask, for the time of its lease; how many tokens may lie there so
is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from extproc import headers as names
from extproc import legs
from extproc.attaching import CLIENT_ERRORS
from extproc.events import Call, Leg
from extproc.store import ReturnedTurn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.events import Headers, Keep, LegResult
    from extproc.identity import ConversationKey
    from extproc.settings import GatewaySettings
    from extproc.store import StoredTurn

AT_ONCE: Final = 2
WAITING_AT_MOST: Final = 256
PATIENCE_SECONDS: Final = 2.0
"""So long a return waits for P to have time; then the turn stays on D."""

POLL_SECONDS: Final = 0.02
LEASE_SECONDS: Final = 30.0
"""vLLM's ``kv_lease_duration``."""

HTTP_OK: Final = 200

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReturnPorts:
    """What returns need of the gateway."""

    call: Callable[[Call], Awaitable[LegResult]]
    is_busy: Callable[[], bool]
    claim: Callable[[ConversationKey, StoredTurn], bool]
    """Take the turn out of the store, if it is still the one."""
    returned: Callable[[ConversationKey, ReturnedTurn | None], None]
    """Note what P will have for a conversation; None: it will not."""
    refused: Callable[[StoredTurn], None]
    """Have D let go of a turn whose return P did not even look at."""
    unread: Callable[[StoredTurn], None]
    """Have D let go of a turn that P perhaps did not read, once P cannot be reading it any more."""
    count: Callable[[str], None]


class ReturnQueue:
    """Returns waiting for P to have time for them."""

    def __init__(self, settings: GatewaySettings, ports: ReturnPorts) -> None:
        self._ports = ports
        self._timeout_seconds = settings.reuse_timeout_seconds
        self._min_tokens = settings.min_reuse_tokens
        self._max_leased_tokens = settings.return_max_leased_tokens
        self._waiting: asyncio.Queue[Keep] = asyncio.Queue(WAITING_AT_MOST)
        self._leases: deque[tuple[float, int]] = deque()
        self._leased_tokens = 0

    @property
    def leased_tokens(self) -> int:
        """Tokens that P still keeps for decode workers that will not ask for them, by our own clock."""
        now = time.monotonic()
        while self._leases and self._leases[0][0] <= now:
            self._leased_tokens -= self._leases.popleft()[1]
        return self._leased_tokens

    def add(self, keep: Keep) -> None:
        """Queue the return of a turn that the store has kept."""
        try:
            self._waiting.put_nowait(keep)
        except asyncio.QueueFull:
            self._ports.count("queue_full")

    async def run(self) -> None:
        """Perform returns until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._run_one_by_one())

    async def _run_one_by_one(self) -> None:
        while True:
            keep = await self._waiting.get()
            try:
                self._ports.count(await self._perform(keep))
            except Exception:
                # One bad return must not end all others with it.
                log.exception("return_failed")
                self._ports.count("failed")

    async def _perform(self, keep: Keep) -> str:
        """Return a turn to P, if P has time and room; returns the result's name."""
        plan, turn = keep.returning, keep.turn
        assert plan is not None  # noqa: S101 - only such are queued
        if not await self._p_has_time():
            return "busy"
        if self.leased_tokens + plan.tokens > self._max_leased_tokens:
            return "leases_full"
        if not self._ports.claim(keep.key, turn):
            return "overtaken"
        # From now on a next turn finds nothing on D, so it is told where to look, even if P has not finished reading.
        self._ports.returned(keep.key, ReturnedTurn(turn.sequence, plan.tokens))
        self._leases.append((time.monotonic() + LEASE_SECONDS, plan.tokens))
        self._leased_tokens += plan.tokens
        headers: Headers = (
            ("content-type", "application/json"),
            (names.LEG, Leg.RETURN),
            (names.CONVERSATION, str(keep.key)),
        )
        result = await self._ports.call(Call(Leg.RETURN, legs.RETURN_PATH, headers, plan.body, self._timeout_seconds))
        prefilled = legs.read_prefilled(result.body) if result.status == HTTP_OK else None
        if prefilled is not None and plan.tokens - (prefilled.cached_tokens or 0) < self._min_tokens:
            return "returned"
        self._ports.returned(keep.key, None)
        if result.status in CLIENT_ERRORS:
            self._ports.refused(turn)
        else:
            self._ports.unread(turn)
        return "failed"

    async def _p_has_time(self) -> bool:
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while self._ports.is_busy():
            if time.monotonic() >= give_up_at:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
