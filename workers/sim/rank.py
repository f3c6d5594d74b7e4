"""One data-parallel rank of a worker: an engine of its own, with an id and a side channel of its own, behind one API.

Source: vLLM 0.32 ``v1/engine/core.py`` (``{engine_id}_dp{rank}``), NIXL ``base_scheduler.py`` (side channel port + rank).
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from workers.sim.engine import Counters, Engine, ReadFailedError
from workers.sim.faults import Kind
from workers.sim.runner import EngineRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.sim import kv
    from workers.sim.faults import Faults
    from workers.sim.peers import Registry
    from workers.sim.settings import WorkerSettings


class Rank:
    """An engine and what drives it. ``start`` gives it a new life under a new id; what it counted stays."""

    def __init__(self, number: int, settings: WorkerSettings, registry: Registry, faults: Faults) -> None:
        self.number = number
        self.engine = Engine(settings.engine)
        self.runner = EngineRunner(self.engine, settings.timing, registry)
        self._registry = registry
        self._faults = faults

    def start(self, settings: WorkerSettings, port: int) -> None:
        """Come up empty, with KV to be read at ``port``."""
        counters = self.engine.counters
        engine_settings = settings.engine
        if settings.vllm_version.startswith("0.33"):
            engine_settings = replace(engine_settings, registration_generation=1)
        self.engine = Engine(engine_settings, host=settings.advertised_host, port=port)
        if settings.data_parallel_size > 1:
            self.engine.engine_id += f"_dp{self.number}"
        self.engine.counters = counters
        self.runner = EngineRunner(self.engine, settings.timing, self._registry)
        self._registry.add(self.engine.engine_id, self)

    async def stop(self) -> None:
        """Drop all requests and KV, as a killed process does."""
        self._registry.remove(self.engine.engine_id)
        await self.runner.close()

    def forget_counts(self) -> None:
        """Count from zero again."""
        self.engine.counters = Counters()

    @property
    def waiting(self) -> int:
        """Requests that have no blocks yet."""
        return len(self.engine.waiting)

    @property
    def load(self) -> int:
        """What vLLM balances by: a waiting request weighs four running ones (``DPLBAsyncMPClient``)."""
        return 3 * self.waiting + self.runner.running_count

    def figures(self) -> dict[str, int]:
        """Return what it counted and how things stand, as numbers that may be added up over ranks."""
        engine = self.engine
        engine.expire(self.runner.now())
        return {
            **asdict(engine.counters),
            "running": self.runner.running_count,
            "waiting": self.waiting,
            "live_pins": len(engine.retained) + len(engine.untracked),
            "live_leases": len(engine.leased),
            "retained_tokens": engine.retained_tokens,
            "free_blocks": engine.pool.free_count,
            "block_count": engine.pool.block_count,
        }

    # --- what peers ask ---------------------------------------------------------------------------------------------

    async def serve_read(self, request_id: str, blocks: Sequence[int], expiry_time: float | None) -> list[kv.Memory]:
        """Let a peer read KV, unless a fault is in the way."""
        engine, runner = self.engine, self.runner
        slow = self._faults.take(Kind.SLOW_READ)
        if slow is not None:
            await asyncio.sleep(slow.seconds or 0)
        if engine.dead or self._faults.take(Kind.FAILED_READ) is not None:
            raise ReadFailedError("the peer does not answer")
        memories = engine.serve_read(request_id, blocks, expiry_time, runner.now())
        runner.kick()
        return memories

    def renew(self, request_id: str) -> None:
        """Take a decode worker's heartbeat."""
        self.engine.renew(request_id, self.runner.now())


def total(figures: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return the figures of several ranks, added up."""
    return {name: sum(each[name] for each in figures) for name in figures[0]}
