"""A gateway in simulated time: performs what an exchange asks for, and plays Envoy around it."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson
import simpy

from bench.soak.workers import Answer, WorkerGoneError
from extproc import headers as names
from extproc import legs
from extproc.attaching import CLIENT_ERRORS
from extproc.events import (
    Call,
    Effect,
    Ended,
    Event,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    Headers,
    Keep,
    LearnBlockSize,
    Leg,
    LegResult,
    Receive,
    Release,
    Reply,
    RequestBody,
    RequestHeaders,
    ResponseBody,
    ResponseHeaders,
    Restore,
    Take,
    header,
)
from extproc.exchange import Exchange
from extproc.http_exchange import StreamEnded
from extproc.pool import PoolKnowledge
from extproc.store import MemoryStore, fate
from workers.sim.api_request import ApiError
from workers.sim.engine import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Generator
    from random import Random

    from bench.soak.workers import Worker
    from extproc.receipt import Receipt
    from extproc.settings import GatewaySettings
    from extproc.store import Dropped
    from workers.sim.api_request import Dialect

HTTP_OK: Final = 200
HOP_SECONDS: Final = 0.001
RELEASE_TIMEOUT_SECONDS: Final = 10.0
RELEASES_AT_ONCE: Final = 4
STRAYS: Final = 0.03
"""Share of turns that Envoy's bounded load sends to another decode worker than the conversation's own."""

FORBIDDEN: Final = (b"remote_block_ids", b"remote_host", b"kvloop_digest")
"""Of the worker's own words; nothing of them may reach a client."""


@dataclass(slots=True)
class Served:
    """What the client of one turn got. ``worker`` is who decoded; ``is_whole``: the answer came to its proper end."""

    receipt: Receipt
    status: int = 0
    body: bytes = b""
    worker: Worker | None = None
    is_whole: bool = False


@dataclass(slots=True)
class Handles:
    """Every handle that left a gateway, to prove by the requests themselves that none left twice."""

    sent: set[tuple[str, str]] = field(default_factory=set)
    sent_twice: int = 0

    def note(self, body: bytes) -> tuple[str, str] | None:
        """Look at a leg's body, and count the decode worker's handle in it; return its name, if there is one."""
        if b'"remote_request_id"' not in body:
            return None
        params = orjson.loads(body)["kv_transfer_params"]
        name = (params["remote_engine_id"], params["remote_request_id"])
        self.sent_twice += name in self.sent
        self.sent.add(name)
        return name

    def refused(self, name: tuple[str, str]) -> None:
        """Forget a handle whose request the worker's front refused: its engine never saw it, so it may be released."""
        self.sent.discard(name)


class Replica:
    """One ext_proc process with its store, and the Envoy in front of it."""

    def __init__(  # noqa: PLR0917 - the world it stands in
        self,
        env: simpy.Environment,
        dice: Random,
        settings: GatewaySettings,
        prefill: list[Worker],
        decode: list[Worker],
        handles: Handles,
    ) -> None:
        self.env = env
        self.dice = dice
        self.settings = settings
        self.prefill = prefill
        self.decode = decode
        self.handles = handles
        self.turns: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.live: dict[simpy.Process, None] = {}
        self._start_empty()
        env.process(self._expire_for_ever())

    def serve(
        self, path: str, headers: Headers, body: bytes, *, leaves_after: float | None
    ) -> Generator[simpy.Event, Any, Served]:
        """Serve one request; the client leaves after that many seconds, unless it has been answered by then."""
        exchange = Exchange(self.settings, self.pool)
        served = Served(exchange.receipt)
        process = self.env.process(self._serve(exchange, path, headers, body, served))
        self.live[process] = None
        if leaves_after is None:
            yield process
        else:
            yield process | self.env.timeout(leaves_after)
            if process.is_alive:
                process.interrupt("left")
                yield process
        self.live.pop(process, None)
        self.turns[exchange.receipt.outcome] += 1
        if exchange.receipt.reason is not None:
            self.reasons[exchange.receipt.reason] += 1
        return served

    def crash(self) -> None:
        """Lose the store and every running exchange, as a killed process does."""
        for process in list(self.live):
            if process.is_alive:
                process.interrupt("crashed")
        self._start_empty()

    def drain(self) -> None:
        """Release everything kept, as an orderly stop does, and start with an empty store."""
        self._release_dropped(self.store.drain())

    def _start_empty(self) -> None:
        settings = self.settings
        self.pool = PoolKnowledge()
        self.store = MemoryStore(max_conversations=settings.store_max_conversations, max_bytes=settings.store_max_bytes)
        self._releases: deque[Release] = deque()
        self._releasing = 0

    # --- performing -------------------------------------------------------------------------------------------------

    def _serve(
        self, exchange: Exchange, path: str, headers: Headers, body: bytes, served: Served
    ) -> Generator[simpy.Event, Any, None]:
        envoy = Envoy(self, path, headers, body, served)
        run = exchange.run()
        try:
            with contextlib.suppress(StopIteration):
                effect = next(run)
                while True:
                    effect = run.send((yield from self._perform(effect, envoy)))
            yield from envoy.pass_the_rest()
        except simpy.Interrupt as interrupt:
            if interrupt.cause == "left":
                self._abandon(run)
        finally:
            envoy.close()

    def _perform(  # noqa: C901 - one case per effect
        self, effect: Effect, envoy: Envoy
    ) -> Generator[simpy.Event, Any, Any]:
        match effect:
            case Receive():
                return (yield from envoy.next_event())
            case Call():
                return (yield from self._call(effect))
            case Take(key):
                return self.store.take(key)
            case Keep(key, turn):
                dropped = self.store.put(key, turn)
                self._release_dropped(dropped)
                return fate(turn, dropped)
            case Restore(key, turn):
                self._release_dropped(self.store.restore(key, turn))
            case Release():
                self._release(effect)
            case LearnBlockSize(engine_id):
                self.env.process(self._learn_block_size(engine_id))
            case ForwardRequest(body, set_headers):
                envoy.forward(body or b"", set_headers)
            case ForwardResponseHeaders(watch):
                envoy.is_watched = watch
            case ForwardChunk(data):
                envoy.deliver(data)
            case Reply(status, body):
                envoy.refuse(status, body)
        return None

    def _abandon(self, run: Generator[Effect, Any, None]) -> None:
        with contextlib.suppress(StopIteration, StreamEnded):
            effect = run.throw(StreamEnded())
            while True:
                if isinstance(effect, Release):
                    self._release(effect)
                effect = run.send(None)

    def _prefill_worker(self, call: Call) -> Worker | None:  # noqa: ARG002 - who has affinity looks at it
        """Choose any prefill worker that is up."""
        return min((each for each in self.prefill if each.is_up), key=lambda _: self.dice.random(), default=None)

    def _call(self, call: Call, *, is_late: bool = False) -> Generator[simpy.Event, Any, LegResult]:
        """Perform a call. ``is_late``: a release of what was sent once, when nobody can be reading it any more."""
        started = self.env.now
        handle = None if is_late or call.leg is Leg.RENDER else self.handles.note(call.body)
        worker = self._prefill_worker(call)
        yield self.env.timeout(self.dice.uniform(0, 2 * HOP_SECONDS))
        status, body, error = 503, b"", ""
        if call.leg is Leg.RENDER and worker is not None:
            status, body = worker.render(call.body)
        elif worker is not None:
            request_id = header(call.headers, "x-request-id") or "release"
            answering = self.env.process(worker.answer(_dialect(call.path), call.body, request_id))
            try:
                yield answering | self.env.timeout(call.timeout_seconds)
            finally:
                if answering.is_alive:
                    answering.interrupt()
            answer: tuple[int, bytes] = (0, b"")
            if answering.processed:
                answer = answering.value  # type: ignore[assignment] # simpy leaves it open
            status, body = answer
            error = "" if status else ("unreachable" if answering.processed else "timeout")
        if handle is not None and status in CLIENT_ERRORS:
            self.handles.refused(handle)
        return LegResult(status, body, at=self.env.now, elapsed_seconds=self.env.now - started, error=error)

    def _learn_block_size(self, engine_id: str) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(10 * HOP_SECONDS)
        for worker in self.decode:
            if worker.engine.engine_id == engine_id:
                self.pool.learn_block_size(engine_id, worker.settings.engine.block_size)

    # --- in the background ------------------------------------------------------------------------------------------

    def _release_dropped(self, dropped: list[Dropped]) -> None:
        for drop in dropped:
            if drop.reason != "engine_gone":
                self._release(Release(drop.turn.handle, drop.turn.model, drop.reason))

    def _release_later(self, release: Release) -> Generator[simpy.Event, Any, None]:
        queue = self._releases
        yield self.env.timeout(release.after_seconds)
        if queue is self._releases:  # else this process has been killed meanwhile
            self._queue(release)

    def _release(self, release: Release) -> None:
        if release.after_seconds:
            self.env.process(self._release_later(release))
        else:
            self._queue(release)

    def _queue(self, release: Release) -> None:
        self._releases.append(release)
        if self._releasing < RELEASES_AT_ONCE:
            self._releasing += 1
            self.env.process(self._release_all(self._releases))

    def _release_all(self, queue: deque[Release]) -> Generator[simpy.Event, Any, None]:
        while queue:
            release = queue.popleft()
            body = legs.release_body(release.handle, release.model)
            call = Call(Leg.RELEASE, legs.RELEASE_PATH, (), body, RELEASE_TIMEOUT_SECONDS)
            result = yield from self._call(call, is_late=release.after_seconds > 0)
            self.released["freed" if result.status == HTTP_OK else "failed"] += 1
        if queue is self._releases:
            self._releasing -= 1

    def _expire_for_ever(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self.env.timeout(1.0)
            self._release_dropped(self.store.expire(self.env.now))


class Envoy:
    """One HTTP exchange as Envoy sees it: bodies cut anywhere, the decode worker chosen by conversation."""

    def __init__(self, replica: Replica, path: str, headers: Headers, body: bytes, served: Served) -> None:
        self.replica = replica
        self.env = replica.env
        self.dice = replica.dice
        self.served = served
        self.is_watched = False
        self._dialect = _dialect(path)
        self._path = path
        self._answer: Answer | None = None
        self._failure = 0
        self._told_headers = False
        self._is_first = True
        self._is_over = False
        self._chunk = b""
        now = self.env.now
        pseudo: Headers = ((":method", "POST"), (":path", path), ("x-request-id", f"{self.dice.getrandbits(64):x}"))
        self._headers = pseudo + headers
        pieces = _cut(body, self.dice)
        self._events: deque[Event] = deque([RequestHeaders(self._headers, end_of_stream=False, at=now)])
        self._events += [RequestBody(piece, piece is pieces[-1], now) for piece in pieces]

    def close(self) -> None:
        """Drop the connection to the decode worker."""
        if self._answer is not None:
            self._answer.close()

    def forward(self, body: bytes, set_headers: Headers) -> None:
        """Send the request on."""
        worker = self._choose(header(set_headers, names.CONVERSATION))
        request_id = header(self._headers, "x-request-id") or ""
        try:
            if worker is None:
                self._failure = 503
            else:
                self._answer = Answer(worker, self._dialect, body, request_id)
                self.served.worker = worker
        except ApiError as error:
            self._failure = error.status
        except EngineDeadError:
            self._failure = 500

    def refuse(self, status: int, body: bytes) -> None:
        """Answer the client with the gateway's own words."""
        self.served.status, self.served.body, self.served.is_whole = status, body, True
        self._is_over = True

    def deliver(self, replacement: bytes | None) -> None:
        """Let the chunk go that the exchange was last shown."""
        self.served.body += self._chunk if replacement is None else replacement

    def next_event(self) -> Generator[simpy.Event, Any, Event]:
        """Return the next message of the ext_proc stream."""
        if self._events:
            return self._shown(self._events.popleft())
        if self._is_over:
            return Ended(self.env.now)
        yield self.env.timeout(self.dice.uniform(0, HOP_SECONDS))
        if not self._told_headers:
            return self._response_headers()
        self._queue(_cut((yield from self._next_bytes()), self.dice))
        return self._shown(self._events.popleft())

    def pass_the_rest(self) -> Generator[simpy.Event, Any, None]:
        """Stream what the exchange does not want to see."""
        if self._answer is None or self.is_watched:
            return
        while not self._is_over:
            self.served.body += yield from self._next_bytes()

    def _queue(self, pieces: list[bytes]) -> None:
        now = self.env.now
        self._events += [ResponseBody(piece, end_of_stream=False, at=now) for piece in pieces]
        if self._is_over:
            self._events.append(ResponseBody(b"", end_of_stream=True, at=now) if self.served.is_whole else Ended(now))

    def _shown(self, event: Event) -> Event:
        self._chunk = event.data if isinstance(event, ResponseBody) else b""
        return event

    def _response_headers(self) -> Event:
        self._told_headers = True
        call = None if self._answer is None else self._answer.call
        self.served.status = self._failure or HTTP_OK
        self._is_over = self._answer is None
        kind = "text/event-stream; charset=utf-8" if call is not None and call.stream else "application/json"
        headers = ((":status", str(self.served.status)), ("content-type", kind))
        return ResponseHeaders(headers, end_of_stream=False, at=self.env.now, upstream_address="10.0.0.1:8200")

    def _next_bytes(self) -> Generator[simpy.Event, Any, bytes]:
        answer = self._answer
        assert answer is not None  # noqa: S101 - without one it is over already
        try:
            output = yield from answer.next_output()
            if answer.call.stream:
                first, self._is_first = self._is_first, False
                data = answer.events(output, first=first)
            else:
                outputs = []
                while output is not None:
                    outputs.append(output)
                    output = yield from answer.next_output()
                data = answer.whole(outputs)
        except (WorkerGoneError, EngineDeadError):
            self._is_over = True
            return b""
        if output is None:
            self._is_over = self.served.is_whole = True
        return data

    def _choose(self, conversation: str | None) -> Worker | None:
        up = [worker for worker in self.replica.decode if worker.is_up]
        if conversation is None or self.dice.random() < STRAYS:
            return self.dice.choice(up) if up else None
        home = self.replica.decode[int(conversation[:8], 16) % len(self.replica.decode)]
        return home if home.is_up else (up[0] if up else None)


def _dialect(path: str) -> Dialect:
    return "chat" if "/chat/" in path else "completions"


def _cut(data: bytes, dice: Random) -> list[bytes]:
    """Return the data in one piece mostly, else in two or three, cut anywhere."""
    if len(data) < 2 or dice.random() < 0.9:  # noqa: PLR2004 - nothing to cut
        return [data]
    cuts = sorted({0, *(dice.randrange(1, len(data)) for _ in range(2)), len(data)})
    return [data[start:end] for start, end in itertools.pairwise(cuts)]
