"""Exchanges of every role, side by side, told anything in any order: what must hold of them holds after every step.

Hypothesis plays Envoy, P, D and the clock. What is true of each handle (the tokens behind it) only this module knows, so
what an exchange attaches is checked against the tokens themselves, not against the proof's digests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from world import FOR_DECODE, handle_params, sse

from extproc.attaching import CLIENT_ERRORS
from extproc.errors import EnvoyProtocolError
from extproc.events import (
    Call,
    Effect,
    Ended,
    Event,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
    Keep,
    LearnBlockSize,
    Leg,
    LegResult,
    Receive,
    Release,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Restore,
    Take,
)
from extproc.exchange import Exchange
from extproc.handle import COLD_PREFILL
from extproc.http_exchange import HttpExchange, StreamEnded
from extproc.intercept_decode import DecodeExchange
from extproc.intercept_prefill import PrefillExchange
from extproc.pool import PoolKnowledge
from extproc.prompt_mark import put_mark
from extproc.settings import GatewaySettings
from extproc.sse import EventTooLarge
from extproc.store import Dropped, MemoryStore, fate

SETTINGS = GatewaySettings(event_max_bytes=20_000, handle_ttl_seconds=100, handle_margin_seconds=30)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HISTORY = list(range(1000, 1160))

shares = st.sampled_from([1000, 1000, 1000, 1000, 96, 64, 40, 0])
"""How many tokens of the conversation's history a prompt keeps; all of them, most often."""

rarely = st.integers(0, 5).map(lambda dice: dice == 5)
statuses = st.sampled_from([200, 200, 200, 400, 404, 422, 500, 503, 0])


ANSWERS = {
    ResponseHeaders: ForwardResponseHeaders,
    ResponseBody: ForwardChunk,
    ResponseTrailers: ForwardTrailers,
}
"""What each message of a response is answered with."""


@dataclass
class Run:
    """One exchange under way, and what it has been told and has said."""

    exchange: HttpExchange
    steps: Generator[Effect, Any, None]
    path: str
    conversation: str | None
    prompt: list[int]
    waits_for: Receive | Call | None = None
    told: list[type] = field(default_factory=list)
    said: list[Effect] = field(default_factory=list)
    request_ended: bool = False
    response_begun: bool = False
    response_ended: bool = False
    left: bool = False
    is_served: bool = False
    """It ended by itself, with all said."""


class ExchangeMachine(RuleBasedStateMachine):
    """``truth`` has the tokens of each handle, by the request id in it; ``fates`` what became of each."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.pool = PoolKnowledge()
        self.store = MemoryStore(max_conversations=2, max_bytes=10**6)
        self.runs: list[Run] = []
        self.over: list[Run] = []
        self.truth: dict[str, list[int]] = {}
        self.histories: dict[str | None, list[int]] = {}
        self.kept: set[str] = set()
        self.taken: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.released_late: Counter[str] = Counter()
        """Of those that were sent: told to D when P cannot be reading any more."""
        self.refused_by_p: set[str] = set()
        self.gone: set[str] = set()

    # --- Envoy ------------------------------------------------------------------------------------------------------

    @rule(
        role=st.sampled_from([Exchange, Exchange, Exchange, PrefillExchange, DecodeExchange]),
        path=st.sampled_from([CHAT] * 5 + [COMPLETIONS, COMPLETIONS, "/v1/embeddings"]),
        conversation=st.sampled_from(["a"] * 8 + ["b", "b", "c", None, "x" * 300]),
        shared=shares,
        own=st.sampled_from([0, 0, 1, 5, 31, 60]),
        has_body=st.sampled_from([True] * 9 + [False]),
    )
    @precondition(lambda self: len(self.runs) < 3)
    def open(
        self, role: type[HttpExchange], path: str, conversation: str | None, shared: int, own: int, *, has_body: bool
    ) -> None:
        exchange = role(SETTINGS, self.pool)
        history = self.histories.get(conversation, HISTORY)
        run = Run(exchange, exchange.run(), path, conversation, history[:shared] + [7] * own)
        self.runs.append(run)
        self.go_on(run, None)
        named = () if conversation is None else (("x-conversation-id", conversation),)
        headers = ((":method", "POST"), (":path", path), ("x-request-id", f"r{len(self.over)}"), *named)
        self.tell(run, RequestHeaders(headers, end_of_stream=not has_body, at=self.now))

    @rule(which=st.integers(0, 2), steps=st.sampled_from([1, 2, 3, 9, 9]), generated=st.integers(1, 40))
    @precondition(lambda self: self.runs)
    def go_well(self, which: int, steps: int, generated: int) -> None:
        """Let one exchange go on for some steps as most do."""
        run = self.runs[which % len(self.runs)]
        for _ in range(steps):
            at = self.runs.index(run) if run in self.runs else None
            waiting = [other for other in self.runs if isinstance(other.waits_for, Receive)]
            if at is None:
                return
            if isinstance(run.waits_for, Call):
                calling = [other for other in self.runs if isinstance(other.waits_for, Call)]
                self.answer_call(calling.index(run), 200, "right", read=True, seconds=0.0)
            elif not run.request_ended:
                self.upload(waiting.index(run), "ids" if run.path == COMPLETIONS else "chat", 10, "body")
            elif not run.response_begun:
                self.begin_response(waiting.index(run), "text/event-stream")
            else:
                self.finish_turn(waiting.index(run), generated, "right", {}, restarted=False, end="body")

    @rule(
        which=st.integers(0, 2),
        body=st.sampled_from(["chat", "chat", "chat", "ids", "two", "echo", "broken", "forbidden"]),
        cut=st.integers(0, 60),
        by=st.sampled_from(["body", "body", "trailers"]),
    )
    @precondition(lambda self: self.receiving(0))
    def upload(self, which: int, body: str, cut: int, by: str) -> None:
        """Send the whole body, in two pieces."""
        run = self.receiving(which)
        if run is None or run.request_ended or run.response_begun:
            return
        text = orjson.dumps(self.body(body, run)) if body != "broken" else b'{"model":'
        self.tell(run, RequestBody(text[:cut], end_of_stream=False, at=self.now))
        run = self.again(run)
        if run is not None:
            self.tell(run, RequestBody(text[cut:], end_of_stream=by == "body", at=self.now))
        run = self.again(run)
        if run is not None and by == "trailers":
            self.tell(run, RequestTrailers(self.now))

    @rule(which=st.integers(0, 2), content=st.sampled_from(["text/event-stream", "application/json", "text/plain"]))
    @precondition(lambda self: self.receiving(0))
    def begin_response(self, which: int, content: str) -> None:
        run = self.receiving(which)
        if run is not None and not run.response_begun and RequestHeaders in run.told:
            headers = ((":status", "200"), ("content-type", content))
            self.tell(run, ResponseHeaders(headers, end_of_stream=False, at=self.now, upstream_address="10.0.0.7:8200"))

    @rule(
        which=st.integers(0, 2),
        generated=st.integers(1, 40),
        digest=st.sampled_from(["right", "right", "right", "right", "none", "half"]),
        changes=st.sampled_from([{}, {}, {}, {"transfer_mode": "push"}, {"remote_host": "localhost"}, {"x_new": 1}]),
        restarted=rarely,
        end=st.sampled_from(["later", "body", "trailers"]),
    )
    @precondition(lambda self: any(run.response_begun for run in self.runs))
    def finish_turn(
        self, which: int, generated: int, digest: str, changes: dict[str, Any], *, restarted: bool, end: str
    ) -> None:
        """Let D send its last message, with a handle nobody has seen before."""
        run = self.receiving(which)
        if run is None or not run.response_begun or run.response_ended:
            return
        tokens = [*run.prompt, *range(5000, 5000 + generated)][:-1]
        name = f"turn-{len(self.truth)}"
        self.truth[name] = self.histories[run.conversation] = tokens
        known = {"right": tokens, "none": None, "half": tokens[: len(tokens) // 2]}[digest]
        engine = f"engine-{len(self.truth)}" if restarted else "engine"
        params = handle_params(len(tokens), digest_of=known, remote_request_id=name, remote_engine_id=engine)
        message = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        last = sse({**message, "kv_transfer_params": {**params, **changes}})
        self.tell(run, ResponseBody(last, end_of_stream=end == "body", at=self.now))
        if end == "trailers" and self.again(run):
            self.tell(run, ResponseTrailers(self.now))

    @rule(
        which=st.integers(0, 2), data=st.sampled_from([b"", b"data: {}\n\n", b"data: {", b": ping\n\n", b"x" * 30_000])
    )
    @precondition(lambda self: any(run.response_begun for run in self.runs))
    def chunk(self, which: int, data: bytes) -> None:
        run = self.receiving(which)
        if run is not None and run.response_begun and not run.response_ended:
            self.tell(run, ResponseBody(data, end_of_stream=False, at=self.now))

    @rule(
        which=st.integers(0, 2),
        kind=st.sampled_from([RequestBody, RequestTrailers, ResponseHeaders, ResponseBody, ResponseTrailers]),
        rarely=rarely,
    )
    @precondition(lambda self: self.receiving(0))
    def anything(self, which: int, kind: type, *, rarely: bool) -> None:
        """Send any message at any time, as a broken Envoy might."""
        run = self.receiving(which)
        if run is None or not rarely:
            return
        messages: dict[type, Event] = {
            RequestBody: RequestBody(b"", end_of_stream=True, at=self.now),
            RequestTrailers: RequestTrailers(self.now),
            ResponseHeaders: ResponseHeaders(((":status", "503"),), end_of_stream=False, at=self.now),
            ResponseBody: ResponseBody(b"", end_of_stream=True, at=self.now),
            ResponseTrailers: ResponseTrailers(self.now),
        }
        self.tell(run, messages[kind])

    @rule(which=st.integers(0, 2), rarely=rarely)
    @precondition(lambda self: self.receiving(0))
    def close(self, which: int, *, rarely: bool) -> None:
        run = self.receiving(which)
        if run is not None and rarely:
            self.tell(run, Ended(self.now))

    @rule(which=st.integers(0, 2), rarely=rarely)
    @precondition(lambda self: self.runs)
    def leave(self, which: int, *, rarely: bool) -> None:
        """The client is gone: the shell drops whatever the exchange was waiting for."""
        if not rarely:
            return
        run = self.runs[which % len(self.runs)]
        run.left = True
        self.go_on(run, StreamEnded())

    # --- P ----------------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 2),
        status=statuses,
        ids=st.sampled_from(["right", "right", "right", "right", "others", "none"]),
        read=st.booleans(),
        seconds=st.sampled_from([0.0, 0.0, 1.0, 60.0]),
    )
    @precondition(lambda self: any(isinstance(run.waits_for, Call) for run in self.runs))
    def answer_call(self, which: int, status: int, ids: str, *, read: bool, seconds: float) -> None:
        calling = [run for run in self.runs if isinstance(run.waits_for, Call)]
        if not calling:
            return
        run = calling[which % len(calling)]
        call = run.waits_for
        assert isinstance(call, Call)
        self.now += seconds
        asked = orjson.loads(call.body)
        params = asked.get("kv_transfer_params", {})
        prompt = params.get("prompt_token_ids") or asked.get("prompt") or run.prompt
        told = {"right": prompt, "others": [1, 2, 3], "none": None}[ids]
        if call.leg is Leg.RENDER:
            body: Any = {"token_ids": told}
        else:
            cached = params.get("remote_num_tokens", 0) if read else 0
            body = {"kv_transfer_params": {**FOR_DECODE, "remote_prefill_cached_tokens": cached}}
            body["prompt_token_ids"] = told
        if "remote_request_id" in params and status in CLIENT_ERRORS:
            self.refused_by_p.add(params["remote_request_id"])
        error = "" if status else "timeout"
        result = LegResult(status, orjson.dumps(body), self.now, seconds, error=error)
        self.go_on(run, result)

    @rule(seconds=st.sampled_from([0.5, 1.0, 20.0, 50.0]))
    @precondition(lambda self: len(self.store))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.note_dropped(self.store.expire(self.now))

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_message_is_answered_once_and_in_order(self) -> None:
        for run in (*self.runs, *self.over[-3:]):
            said = [type(answer) for answer in run.said]
            first = [kind for kind in said if kind in (ForwardRequest, Reply)]
            assert first == said[: len(first)], "the request is answered first"
            assert len(first) <= run.request_ended or said == [Reply], "once, when all of it is here, or refused early"
            rest = said[len(first) :]
            owed = [ANSWERS[kind] for kind in run.told if kind in ANSWERS]
            assert rest == owed[: len(rest)]
            if isinstance(run.waits_for, Receive) or run.is_served:
                assert rest == owed, "it goes on, or ends, before it has answered what is here"

    @invariant()
    def a_handle_goes_one_way_once(self) -> None:
        assert not [name for name, times in self.taken.items() if times > 1]
        assert not [name for name, times in self.sent.items() if times > 1]
        assert not [name for name, times in self.released.items() if times > 1]
        both = self.sent.keys() & self.released.keys()
        assert both <= self.refused_by_p, "released at once although P may be reading it"
        assert not [name for name, times in self.released_late.items() if times > 1]
        assert self.released_late.keys() <= self.sent.keys() - self.released.keys(), "waited for nothing"

    @invariant()
    def no_handle_is_lost(self) -> None:
        """Of what was ever kept, each is still kept, or in the hands of a running exchange, or sent, or released."""
        in_store = {name_of(turn.handle.raw) for turn in self.store._turns.values()}
        in_hand = {name_of(run.exchange._unsent.handle.raw) for run in self.runs if run.exchange._unsent is not None}
        known = in_store | in_hand | self.sent.keys() | self.released.keys() | self.gone
        assert self.kept <= known
        assert not in_store & (self.sent.keys() | self.released.keys())

    def teardown(self) -> None:
        for run in list(self.runs):
            run.left = True
            self.go_on(run, StreamEnded())
        self.no_handle_is_lost()
        self.a_handle_goes_one_way_once()
        assert not self.runs

    # --- the shell, by hand -----------------------------------------------------------------------------------------

    def receiving(self, which: int) -> Run | None:
        waiting = [run for run in self.runs if isinstance(run.waits_for, Receive)]
        return waiting[which % len(waiting)] if waiting else None

    def again(self, run: Run | None) -> Run | None:
        """Return the exchange if it still waits for a message."""
        return run if run is not None and isinstance(run.waits_for, Receive) else None

    def tell(self, run: Run, event: Event) -> None:
        run.told.append(type(event))
        run.request_ended |= isinstance(event, RequestTrailers) or getattr(event, "end_of_stream", False)
        run.response_begun |= isinstance(event, ResponseHeaders | ResponseBody | ResponseTrailers)
        run.response_ended |= isinstance(event, ResponseTrailers) or (
            isinstance(event, ResponseBody) and event.end_of_stream
        )
        self.go_on(run, event)

    def go_on(self, run: Run, result: Any) -> None:
        """Let it go on until it has to wait again, as ``ProcessStream`` does."""
        run.waits_for = None
        try:
            effect = run.steps.throw(result) if isinstance(result, Exception) else run.steps.send(result)
            while not isinstance(effect, Receive | Call):
                effect = run.steps.send(self.perform(run, effect))
            assert not run.left, "it asks for more although the client is gone"
            run.waits_for = effect
            if isinstance(effect, Call):
                self.check_attached(effect)
        except StopIteration:
            run.is_served = not run.left and Ended not in run.told
            self.end(run)
        except (EnvoyProtocolError, EventTooLarge):
            self.end(run)

    def end(self, run: Run) -> None:
        self.runs.remove(run)
        self.over.append(run)
        assert run.exchange._unsent is None, "a taken handle was neither sent nor released"

    def perform(self, run: Run, effect: Effect) -> Any:
        if run.left:
            assert isinstance(effect, Release), f"{effect} after the client left"
        match effect:
            case Take(key):
                turn = self.store.take(key)
                if turn is not None:
                    self.taken[name_of(turn.handle.raw)] += 1
                return turn
            case Keep(key, turn):
                self.kept.add(name_of(turn.handle.raw))
                dropped = self.store.put(key, turn)
                self.note_dropped(dropped)
                return fate(turn, dropped)
            case Restore(key, turn):
                assert name_of(turn.handle.raw) not in self.sent, "given back although P may have read it"
                del self.taken[name_of(turn.handle.raw)]
                self.note_dropped(self.store.restore(key, turn))
            case Release(handle, after_seconds=0.0):
                self.note_release(handle.raw)
            case Release(handle):
                self.released_late[name_of(handle.raw)] += 1
            case LearnBlockSize():
                pass
            case answer:
                run.said.append(answer)
        return None

    def note_dropped(self, dropped: list[Dropped]) -> None:
        for drop in dropped:
            if drop.reason == "engine_gone":
                self.gone.add(name_of(drop.turn.handle.raw))
            else:
                self.note_release(drop.turn.handle.raw)

    def note_release(self, raw: bytes) -> None:
        self.released[name_of(raw)] += 1

    def check_attached(self, call: Call) -> None:
        """What goes to P claims no more than the tokens that are really there, and less than the whole prompt."""
        if call.leg is not Leg.PREFILL:
            return
        body = orjson.loads(call.body)
        params = body["kv_transfer_params"]
        if "remote_request_id" not in params:
            assert params["do_remote_decode"] is True
            return
        name, claimed = params["remote_request_id"], params["remote_num_tokens"]
        self.sent[name] += 1
        prompt = params.get("prompt_token_ids", body.get("prompt"))
        assert isinstance(prompt, list), "attached to a prompt nobody has tokenised"
        assert 0 < claimed < len(prompt)
        assert self.truth[name][:claimed] == prompt[:claimed]
        assert len(params["remote_block_ids"][0]) == -(-claimed // 32)
        assert not self.pool.prompt_ids_differed
        assert "kvloop_digest" not in params

    def body(self, kind: str, run: Run) -> dict[str, Any]:
        """Return a client's request or, in the other roles, what an orchestrator sends to P or to D."""
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        match run.exchange:
            case PrefillExchange():
                body |= {"stream": False, "kv_transfer_params": orjson.loads(COLD_PREFILL)}
            case DecodeExchange():
                marked = put_mark(orjson.dumps(FOR_DECODE), run.prompt if kind != "echo" else [1, 2, 3], "outcome=cold")
                body["kv_transfer_params"] = orjson.loads(marked)
        match kind:
            case "ids":
                body["prompt"] = run.prompt
            case "two":
                body["n"] = 2
            case "echo":
                body["echo"] = True
            case "forbidden":
                body["kv_transfer_params"] = handle_params(100, remote_request_id="the client's")
        return body


def name_of(raw: bytes) -> str:
    return str(orjson.loads(raw)["remote_request_id"])


class TestExchange(ExchangeMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=300, stateful_step_count=70)
