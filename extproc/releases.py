"""The queue of handles D is to let go of: sent in the background, a few at a time, never on a request's path.

A release is a one-token request to P, so it takes a little of P's time, and one block for P's lease. Hence the rate. It is
tried twice; after that D's own TTL does it. Telling D twice is harmless: it knows the request no more and says so in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.events import Release

AT_ONCE: Final = 4
WAITING_AT_MOST: Final = 10_000
RETRY_AFTER_SECONDS: Final = 1.0

log = structlog.get_logger()


class ReleaseQueue:
    """Releases waiting for their turn.

    ``send`` performs one and says whether D is free of it; ``count`` gets ``(reason, result)`` of each, the result being
    ``freed``, ``failed`` or ``dropped`` (too many were waiting).
    """

    def __init__(
        self,
        send: Callable[[Release], Awaitable[bool]],
        count: Callable[[str, str], None],
        *,
        per_second: float,
        retry_after_seconds: float = RETRY_AFTER_SECONDS,
    ) -> None:
        self._send = send
        self._count = count
        self._interval_seconds = 1.0 / per_second
        self._retry_after_seconds = retry_after_seconds
        self._waiting: asyncio.Queue[Release] = asyncio.Queue(WAITING_AT_MOST)
        self._next_start = 0.0
        self._under_way = 0
        self._tokens: Counter[str] = Counter()
        self._hurries = asyncio.Event()

    def __len__(self) -> int:
        """Count releases waiting or under way."""
        return self._waiting.qsize() + self._under_way

    def tokens_of(self, engine_id: str) -> int:
        """Return how many tokens an engine still holds that are to be released."""
        return self._tokens[engine_id]

    def add(self, release: Release) -> None:
        """Queue a release; beyond ``WAITING_AT_MOST`` it is dropped and counted."""
        try:
            self._waiting.put_nowait(release)
        except asyncio.QueueFull:
            self._count(release.reason, "dropped")
        else:
            self._tokens[release.handle.engine_id] += release.handle.tokens

    async def run(self) -> None:
        """Perform releases until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._run_one_by_one())

    async def finish(self) -> None:
        """Wait until the queue is empty, from now on without a rate: the gateway stops and P has nothing else of it."""
        self._hurries.set()
        await self._waiting.join()

    async def _run_one_by_one(self) -> None:
        while True:
            release = await self._waiting.get()
            self._under_way += 1
            try:
                await self._pause(self._reserve_start())
                freed = await self._try(release)
                if not freed:
                    await self._pause(self._retry_after_seconds)
                    freed = await self._try(release)
                self._count(release.reason, "freed" if freed else "failed")
            finally:
                self._under_way -= 1
                self._forget(release)
                self._waiting.task_done()

    def _forget(self, release: Release) -> None:
        engine_id = release.handle.engine_id
        self._tokens[engine_id] -= release.handle.tokens
        if not self._tokens[engine_id]:
            del self._tokens[engine_id]

    def _reserve_start(self) -> float:
        """Take the next free start time; return how many seconds it is away."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._next_start)
        self._next_start = start + self._interval_seconds
        return start - now

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurries.wait()

    async def _try(self, release: Release) -> bool:
        try:
            return await self._send(release)
        except Exception:
            # One bad release must not end all others with it.
            log.exception("release_failed")
            return False
