"""Simulated workers in simulated time: requests in, vLLM's bytes out, reads between engines that take their time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson
import simpy

from workers.sim import text
from workers.sim.answer import Choice, StopText, choices_of, told_handle
from workers.sim.api_request import ApiCall, ApiError, parse_body, parse_call
from workers.sim.api_response import DONE, AnswerWriter, Output
from workers.sim.engine import Engine, EngineDeadError, Load, ReadFailedError, Request, State

if TYPE_CHECKING:
    from collections.abc import Generator
    from random import Random

    from workers.sim.api_request import Dialect
    from workers.sim.settings import WorkerSettings

TOKEN_SECONDS: Final = 0.01
PREFILL_TOKENS_PER_SECOND: Final = 20_000.0
PREEMPTED_SECONDS: Final = 0.1
READ_SECONDS: Final = 0.02
SLOW_READ_SECONDS: Final = 3.0
SLOW_READS: Final = 0.01
CREATED: Final = 1_764_000_000


class WorkerGoneError(Exception):
    """The worker crashed while it served a request: the connection is reset."""


@dataclass(slots=True)
class Network:
    """Who is reachable: every live engine by its id."""

    env: simpy.Environment
    dice: Random
    workers: dict[str, Worker]

    def read(self, load: Load) -> Generator[simpy.Event, Any, Any]:
        """Carry out a read after some time; returns what lay in the blocks then, ``None`` if it failed."""
        slow = self.dice.random() < SLOW_READS
        yield self.env.timeout(self.dice.uniform(0, 2 * (SLOW_READ_SECONDS if slow else READ_SECONDS)))
        server = self.workers.get(load.engine_id)
        if server is None or server.engine.dead:
            return None
        try:
            memories = server.engine.serve_read(load.request_id, load.remote_blocks, load.expiry_time, self.env.now)
        except ReadFailedError:
            return None
        server.kick()
        return memories


class Worker:
    """One worker. ``engine`` is replaced by a restart; its counters live on."""

    def __init__(self, settings: WorkerSettings, network: Network, port: int) -> None:
        self.settings = settings
        self.network = network
        self.env = network.env
        self.port = port
        self.down_until = 0.0
        self.engine = Engine(settings.engine, host="10.0.0.1", port=port)
        self._ready: dict[Request, simpy.Event] = {}
        self._leaked_before = 0
        network.workers[self.engine.engine_id] = self

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self.env.now >= self.down_until and not self.engine.dead

    @property
    def leaked_blocks(self) -> int:
        """Blocks this engine lost since its last start, by vLLM's own fault."""
        return self.engine.counters.blocks_leaked - self._leaked_before

    def restart(self, outage_seconds: float) -> None:
        """Lose all KV and every request, and come back on the same address under a new engine id."""
        counters = self.engine.counters
        self._leaked_before = counters.blocks_leaked
        del self.network.workers[self.engine.engine_id]
        self.engine = Engine(self.settings.engine, host="10.0.0.1", port=self.port)
        self.engine.counters = counters
        self.network.workers[self.engine.engine_id] = self
        self.down_until = self.env.now + outage_seconds
        for event in self._ready.values():
            if not event.triggered:
                event.succeed()

    def kick(self) -> None:
        """Start every request that now finds its blocks."""
        try:
            admitted = self.engine.admit(self.env.now)
        except EngineDeadError:
            self.wake(*self._ready)
            return
        for request in admitted:
            if request.load is not None:
                self.env.process(self._fetch(self.engine, request, request.load))
            if request.state is State.READY:
                self.wake(request)

    def wake(self, *requests: Request) -> None:
        """Let whoever waits for these requests look again."""
        for request in requests:
            event = self._ready.get(request)
            if event is not None and not event.triggered:
                event.succeed()

    def wait(self, request: Request) -> simpy.Event:
        """Return an event of the request's next change of state."""
        event = self._ready.get(request)
        if event is None or event.triggered:
            event = self._ready[request] = self.env.event()
        return event

    def forget(self, request: Request) -> None:
        """Nobody waits for the request any more."""
        self._ready.pop(request, None)

    def reject(self, params: object) -> None:
        """Tell a prefill worker that its blocks will not be fetched after all."""
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            self.env.process(self.network.read(_notice(params)))

    def render(self, body: bytes) -> tuple[int, bytes]:
        """Answer a render request, at once."""
        try:
            call = parse_call("chat" if b'"messages"' in body else "completions", parse_body(body), self.settings, None)
        except ApiError as error:
            return error.status, error.body
        return 200, orjson.dumps({"token_ids": call.prompts[0], "features": None})

    def answer(self, dialect: Dialect, body: bytes, request_id: str) -> Generator[simpy.Event, Any, tuple[int, bytes]]:
        """Answer a request in one piece; interrupting it aborts the request."""
        try:
            stream = Answer(self, dialect, body, request_id)
        except ApiError as error:
            return error.status, error.body
        try:
            outputs = []
            while (output := (yield from stream.next_output())) is not None:
                outputs.append(output)
        except (WorkerGoneError, EngineDeadError, simpy.Interrupt):
            return 0, b""
        finally:
            stream.close()
        return 200, stream.whole(outputs)

    def _fetch(self, engine: Engine, request: Request, load: Load) -> Generator[simpy.Event, Any, None]:
        memories = yield from self.network.read(load)
        if engine is self.engine and not engine.dead:
            engine.finish_load(request, memories, self.env.now)
            self.wake(request)
            self.kick()


class Answer:
    """One request being answered, token by token, as fast as whoever asks for the next one."""

    def __init__(self, worker: Worker, dialect: Dialect, body: bytes, request_id: str) -> None:
        self.worker = worker
        self.env = worker.env
        self.call = self._parse(dialect, body, request_id)
        self.writer = AnswerWriter(self.call, worker.settings, CREATED)
        self._choice: Choice = choices_of(self.call, worker.settings)[0]
        self._stop = StopText(self.call.stop)
        self._engine = worker.engine
        self._prefilled = False
        self._engine.submit(self._choice.request)
        worker.kick()

    def close(self) -> None:
        """End the request if it has not ended by itself."""
        request, worker = self._choice.request, self.worker
        worker.forget(request)
        if request.state is not State.FINISHED and self._engine is worker.engine:
            was_waiting = request.state is State.WAITING
            self._engine.abort(request, self.env.now)
            if was_waiting:
                worker.reject(request.kv_transfer_params)
            worker.kick()

    def next_output(self) -> Generator[simpy.Event, Any, Output | None]:
        """Return what the next token adds, ``None`` after the last; raises when the worker is gone."""
        token = yield from self._next_token()
        if token is None:
            return None
        request = self._choice.request
        reason = request.finish_reason
        shown, stop = self._stop.push(text.decode((token,)), is_last=reason is not None)
        if stop:
            self.close()
        return Output(
            index=0,
            text=shown,
            token_ids=[token],
            completion_tokens=len(request.generated),
            finish_reason="stop" if stop else reason,
            stop_reason=stop,
            handle=told_handle(request, self.worker.settings) if reason is not None else None,
        )

    def events(self, output: Output | None, *, first: bool) -> bytes:
        """Return the server-sent events of one output, or those that end the stream."""
        if output is not None:
            role = self.writer.role_chunks() if first and self.call.dialect == "chat" else []
            return b"".join([*role, self.writer.chunk(output)])
        usage = self.writer.usage_chunk(len(self._choice.request.generated)) if self.call.include_usage else b""
        return usage + DONE

    def whole(self, outputs: list[Output]) -> bytes:
        """Return the non-streamed answer."""
        return self.writer.whole([_sum(outputs)])

    def _parse(self, dialect: Dialect, body: bytes, request_id: str) -> ApiCall:
        if not self.worker.is_up:
            raise ApiError(503, "ServiceUnavailable", "down")
        fields = parse_body(body)
        try:
            return parse_call(dialect, fields, self.worker.settings, request_id)
        except ApiError:
            self.worker.reject(fields.get("kv_transfer_params"))
            raise

    def _next_token(self) -> Generator[simpy.Event, Any, int | None]:
        worker, engine, request = self.worker, self._engine, self._choice.request
        while True:
            if request.state is State.FINISHED:
                if request.finish_reason == "error":
                    raise EngineDeadError
                return None
            if engine is not worker.engine or engine.dead:
                raise WorkerGoneError
            if request.state is not State.READY:
                yield from self._admission()
            elif not self._prefilled:
                self._prefilled = True
                yield self.env.timeout(engine.prefill(request) / PREFILL_TOKENS_PER_SECOND)
            else:
                token = engine.step(request, self.env.now)
                self._prefilled = token is not None
                if token is None:
                    # Preempted. At once it would get the very blocks it gave up, and no more.
                    yield self.env.timeout(PREEMPTED_SECONDS)
                if token is None or request.finish_reason is not None:
                    worker.kick()
                if token is not None:
                    yield self.env.timeout(TOKEN_SECONDS)
                    return token

    def _admission(self) -> Generator[simpy.Event, Any, None]:
        """Wait for blocks and their content; keep the prefill worker's blocks alive meanwhile."""
        request, network = self._choice.request, self.worker.network
        params = request.kv_transfer_params or {}
        if request.state is State.WAITING and params.get("do_remote_prefill"):
            beat = self.env.timeout(self._engine.settings.lease_seconds / 6)
            yield self.worker.wait(request) | beat
            peer = network.workers.get(str(params.get("remote_engine_id")))
            if beat.processed and peer is not None:
                peer.engine.renew(str(params.get("remote_request_id")), self.env.now)
        else:
            yield self.worker.wait(request)


def _sum(outputs: list[Output]) -> Output:
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
    )


def _notice(params: dict[str, Any]) -> Load:
    return Load(
        engine_id=str(params["remote_engine_id"]),
        host=str(params["remote_host"]),
        port=int(params["remote_port"]),
        request_id=str(params["remote_request_id"]),
        remote_blocks=(),
        local_blocks=(),
        expiry_time=None,
    )
