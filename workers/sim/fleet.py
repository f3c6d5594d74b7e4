"""Several simulated workers in one process, in an event loop of their own thread."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from workers.sim.faults import fault_from_json
from workers.sim.peers import Registry
from workers.sim.worker import SimWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from workers.sim.settings import WorkerSettings
    from workers.sim.worker import Received

T = TypeVar("T")


class Fleet:
    """Prefill and decode workers. Use as a context manager; methods may be called from any thread."""

    def __init__(self, prefill: Sequence[WorkerSettings], decode: Sequence[WorkerSettings]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sim-fleet", daemon=True)
        self._thread.start()
        self._registry = Registry()
        self.prefill = [self._make(settings) for settings in prefill]
        self.decode = [self._make(settings) for settings in decode]

    @property
    def workers(self) -> list[SimWorker]:
        """All workers, prefill first."""
        return [*self.prefill, *self.decode]

    def __enter__(self) -> Self:
        for worker in self.workers:
            self.run(worker.start())
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            self.run(worker.stop())
        self.run(self._registry.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of a worker (``worker.restart()``) in the fleet's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, act: Callable[[], T]) -> T:
        """Call a function in the fleet's loop (``worker.clear_faults``), where workers' state may be touched."""

        async def acting() -> T:
            return act()

        return self.run(acting())

    def reports(self) -> list[dict[str, Any]]:
        """Return every worker's report, prefill first."""
        return self.call(lambda: [worker.report() for worker in self.workers])

    def total(self, key: str) -> int:
        """Return the sum of a counter over all workers: ``total("wrong_kv_turns")``."""
        return sum(report[key] for report in self.reports())

    def strike(self, worker: SimWorker, kind: str, **fault: Any) -> None:
        """Put a fault in force: ``strike(fleet.decode[0], "status", status=503, times=2)``. See ``Fault``."""
        self.call(partial(worker.faults.add, fault_from_json({"kind": kind, **fault})))

    def received(self, workers: Sequence[SimWorker]) -> list[Received]:
        """Return the requests these workers got, oldest first."""
        got = self.call(lambda: [received for worker in workers for received in worker.received])
        return sorted(got, key=lambda received: received.at)

    def reset(self) -> None:
        """Forget what was counted and received so far, and take all faults back. KV stays."""

        def act() -> None:
            for worker in self.workers:
                worker.reset()

        self.call(act)

    def requests_by_path(self) -> Counter[str]:
        """Return how many requests the workers saw, by path."""
        return sum((Counter(report["requests_by_path"]) for report in self.reports()), Counter())

    def skip(self, seconds: float) -> None:
        """Let all workers' clocks jump ahead."""
        for worker in self.workers:
            self.call(partial(worker.skip, seconds))

    def _make(self, settings: WorkerSettings) -> SimWorker:
        async def made() -> SimWorker:
            return SimWorker(settings, self._registry)

        return self.run(made())
