"""Keeps each decode engine's budget: asks the engines for their load, and lets go of what is too much."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from extproc.budget import BudgetRules, Entry, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.events import Keep, Restore
    from extproc.identity import ConversationKey
    from extproc.pool import PoolKnowledge
    from extproc.settings import GatewaySettings
    from extproc.workers_client import WorkersClient


class Retention:
    """The ledger of one process, kept up to date. ``let_go`` gets the conversations whose turns must go."""

    def __init__(
        self,
        settings: GatewaySettings,
        pool: PoolKnowledge,
        client: WorkersClient,
        *,
        let_go: Callable[[list[ConversationKey]], object],
        leaving_tokens: Callable[[str], int],
    ) -> None:
        self.ledger = Ledger(
            BudgetRules(
                settings.retain_max_share,
                settings.retain_max_tokens,
                settings.retain_pressure,
                settings.min_reuse_tokens,
            )
        )
        self._refresh_seconds = settings.retain_refresh_seconds
        self._pool = pool
        self._client = client
        self._let_go = let_go
        self._leaving_tokens = leaving_tokens

    def kept(self, keep: Keep | Restore, address: str | None = None) -> None:
        """Note a turn that the store has kept, and let go of others if it is one too many."""
        turn, now = keep.turn, time.monotonic()
        engine_id = turn.handle.engine_id
        block_size = turn.block_size_tokens or self._pool.block_size_tokens(engine_id) or 0
        tokens = max(turn.handle.tokens, max(turn.handle.blocks_per_group) * block_size)
        self.ledger.kept(keep.key, Entry(engine_id, tokens, keep.kind, now, turn.deadline), address)
        self._trim(engine_id, now)

    async def run(self) -> None:
        """Look at every engine that retains something, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._refresh_seconds)
            self.ledger.expire(time.monotonic())
            await asyncio.gather(*(self._look_at(*watched) for watched in self.ledger.watched()))

    async def _look_at(self, engine_id: str, address: str) -> None:
        load = await self._client.engine_load(address)
        self.ledger.observed(engine_id, load, self._leaving_tokens(engine_id))
        self._trim(engine_id, time.monotonic())

    def _trim(self, engine_id: str, now: float) -> None:
        excess = self.ledger.excess(engine_id, now)
        if excess:
            self._let_go(excess)
