"""Drives one engine in an event loop: wakes requests when blocks come free, carries out loads, lets time pass."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from workers.sim.engine import EngineDeadError, Load, ReadFailedError, State

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Sequence

    from workers.sim import kv
    from workers.sim.engine import Engine, Request
    from workers.sim.settings import Timing


class Peers(Protocol):
    """How this worker reaches others' KV."""

    async def read(self, load: Load) -> list[kv.Memory]:
        """Fetch what lies in the load's remote blocks and leave the notice that frees them; or ``ReadFailedError``."""

    async def renew(self, engine_id: str, request_id: str) -> None:
        """Send a heartbeat for a peer's blocks this worker has yet to read."""


class EngineRunner:
    """The engine's event loop, in the place of vLLM's engine core process."""

    def __init__(self, engine: Engine, timing: Timing, peers: Peers) -> None:
        self.engine = engine
        self.timing = timing
        self.peers = peers
        self.skipped_seconds = 0.0
        self._accelerator = asyncio.Lock()
        self._link = asyncio.Lock()
        self._ready: dict[Request, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the worker's clock, in seconds."""
        return time.monotonic() + self.skipped_seconds

    def skip(self, seconds: float) -> None:
        """Let the worker's clock jump ahead, so that leases and retained blocks expire."""
        self.skipped_seconds += seconds
        self.kick()

    @property
    def running_count(self) -> int:
        """Requests submitted and not ended."""
        return len(self._ready)

    async def generate(self, request: Request) -> AsyncGenerator[int, None]:
        """Run a request and yield its tokens; closing the iterator early aborts it."""
        self.engine.submit(request)
        self._ready[request] = asyncio.get_running_loop().create_future()
        try:
            self.kick()
            while request.state is not State.FINISHED:
                await self._admission(request)
                if request.state is not State.READY:  # its read failed, and the policy is to fail
                    break
                await self._prefill(request)
                while request.state is State.READY:
                    token = self._step(request)
                    if token is None:
                        break
                    yield token
                    if request.finish_reason is None:  # there is a next token to wait for
                        await self._pause(self.timing.token_delay_seconds)
        finally:
            del self._ready[request]
            if request.state is not State.FINISHED:
                self.abort(request)

    def abort(self, request: Request) -> None:
        """End a request early and free what it holds."""
        was_waiting = request.state is State.WAITING
        self.engine.abort(request, self.now())
        if was_waiting:
            self.reject(request.kv_transfer_params)
        self.kick()

    def reject(self, params: object) -> None:
        """Tell the prefill worker that its blocks will not be fetched after all."""
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return
        with suppress(KeyError):
            self._spawn(self._notify(_notice(params)))

    def kick(self) -> None:
        """Start every request that now finds its blocks."""
        try:
            admitted = self.engine.admit(self.now())
        except EngineDeadError as error:
            self._die(error)
            return
        for request in admitted:
            if request.load is not None:
                self._spawn(self._fetch(request, request.load))
            if request.state is State.READY:
                self._wake(request)
        self._set_timer()

    async def close(self) -> None:
        """Drop everything at once, as a killed process does."""
        self._die(EngineDeadError())
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _admission(self, request: Request) -> None:
        """Wait until the request has its blocks and their content; keep the prefill worker's blocks alive meanwhile."""
        params = request.kv_transfer_params or {}
        beat_seconds = self.engine.settings.lease_seconds / 6
        while request.state is not State.READY:
            with suppress(TimeoutError):
                async with asyncio.timeout(beat_seconds):
                    await asyncio.shield(self._ready[request])
                break
            if request.state is State.WAITING and params.get("do_remote_prefill"):
                await self.peers.renew(str(params.get("remote_engine_id")), str(params.get("remote_request_id")))
        self._ready[request] = asyncio.get_running_loop().create_future()

    async def _prefill(self, request: Request) -> None:
        computed = self.engine.prefill(request)
        seconds = self.timing.prefill_seconds(computed, len(request.prompt) + len(request.generated) - computed)
        if seconds:
            async with self._accelerator:
                await self._pause(seconds)

    def _step(self, request: Request) -> int | None:
        if self.engine.dead:
            raise EngineDeadError
        token = self.engine.step(request, self.now())
        if token is None or request.state is State.FINISHED:
            self.kick()
        return token

    async def _pause(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)

    async def _fetch(self, request: Request, load: Load) -> None:
        memories: Sequence[kv.Memory] | None
        try:
            memories = await self.peers.read(load)
        except ReadFailedError:
            memories = None
        else:
            await self._cross(len(load.local_blocks) * self.engine.settings.block_size)
        self.engine.finish_load(request, memories, self.now())
        if request.state in {State.READY, State.FINISHED}:
            self._wake(request)
        self.kick()

    async def _cross(self, tokens: int) -> None:
        """Let the time pass that so much KV takes on its way here."""
        seconds = self.timing.transfer_seconds(tokens)
        if seconds:
            async with self._link:
                await self._pause(seconds)

    async def _notify(self, notice: Load) -> None:
        with suppress(ReadFailedError):
            await self.peers.read(notice)

    def _wake(self, request: Request) -> None:
        future = self._ready.get(request)
        if future is not None and not future.done():
            future.set_result(None)

    def _die(self, error: EngineDeadError) -> None:
        self.engine.dead = True
        for future in self._ready.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits gets it; nobody waiting is no mistake

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.engine.next_deadline() if self.engine.waiting else None
        if deadline is not None:
            delay = max(0.0, deadline - self.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self.kick)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _notice(params: dict[str, object]) -> Load:
    return Load(
        engine_id=str(params["remote_engine_id"]),
        host=str(params["remote_host"]),
        port=int(str(params["remote_port"])),
        request_id=str(params["remote_request_id"]),
        remote_blocks=(),
        local_blocks=(),
        expiry_time=None,
    )
