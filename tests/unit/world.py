"""A world for one exchange: it plays Envoy, the workers and the store, by hand and without a clock.

``World.turn`` runs a whole HTTP exchange and returns what everyone got to see of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from extproc import proof
from extproc.admission import Load
from extproc.events import (
    Answer,
    Call,
    Effect,
    Ended,
    Event,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
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
from extproc.http_exchange import HttpExchange, StreamEnded
from extproc.identity import ConversationKey
from extproc.pool import PoolKnowledge
from extproc.receipt import Receipt
from extproc.settings import GatewaySettings
from extproc.store import MemoryStore, ReturnedTurn, fate

ENGINE = "8b88bf27-8cc6-49d6-9401-46df614000ff"
BLOCK_SIZE = 32


def handle_params(
    tokens: int, *, digest_of: Sequence[int] | None = None, prompt: Sequence[int] | None = None, **changes: Any
) -> dict[str, Any]:
    """Transfer parameters as D publishes them for ``tokens`` tokens, in blocks of 32."""
    params: dict[str, Any] = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, 1 - (-tokens // BLOCK_SIZE)))],
        "remote_engine_id": ENGINE,
        "remote_request_id": "chatcmpl-a397ba302b3a2119-8fd6497e",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 1994.820642352,
        "transfer_mode": "pull",
    }
    if digest_of is not None:
        params["kvloop_digest"] = proof.to_json(proof.fingerprint(digest_of)) | {"block_size": BLOCK_SIZE}
        if prompt is not None:
            params["kvloop_digest"]["prompt"] = proof.prompt_end_to_json(proof.prompt_end(prompt))
    return params | changes


FOR_DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8]],
    "remote_num_tokens": 9,
}
"""Transfer parameters as P answers with them."""


@dataclass
class Seen:
    """What one exchange showed to the outside."""

    receipt: Receipt
    answers: list[Answer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    learns: list[LearnBlockSize] = field(default_factory=list)
    client_body: bytes = b""
    received: int = 0
    """Events the exchange took from Envoy."""
    loads: dict[type, Load] = field(default_factory=dict)
    """The load at the last effect of each kind."""

    @property
    def forwarded(self) -> ForwardRequest:
        """The one request that went on to D."""
        (answer,) = [answer for answer in self.answers if isinstance(answer, ForwardRequest)]
        return answer

    @property
    def decode(self) -> dict[str, Any]:
        """The body that went on to D, parsed."""
        assert self.forwarded.body is not None
        return dict(orjson.loads(self.forwarded.body))

    @property
    def replied(self) -> Reply:
        """What was answered in a worker's place."""
        (answer,) = [answer for answer in self.answers if isinstance(answer, Reply)]
        return answer

    @property
    def refused(self) -> Reply:
        (answer,) = [answer for answer in self.answers if isinstance(answer, Reply)]
        return answer

    @property
    def response_headers(self) -> ForwardResponseHeaders:
        (answer,) = [answer for answer in self.answers if isinstance(answer, ForwardResponseHeaders)]
        return answer

    def leg_bodies(self, leg: Leg) -> list[dict[str, Any]]:
        """Bodies of our own calls of one kind, parsed, in order."""
        return [orjson.loads(call.body) for call in self.calls if call.leg is leg]


Worker = Callable[[Call], LegResult]


@dataclass
class World:
    """Shared by the exchanges of a test. ``now`` moves only when a test moves it."""

    settings: GatewaySettings = field(default_factory=GatewaySettings)
    pool: PoolKnowledge = field(default_factory=PoolKnowledge)
    store: MemoryStore = field(default_factory=lambda: MemoryStore(max_conversations=1000, max_bytes=10**9))
    role: type[HttpExchange] = Exchange
    worker: str = ""
    now: float = 1000.0
    render: Worker | None = None
    prefill: Worker | None = None
    released: list[Release] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    returned: dict[ConversationKey, ReturnedTurn] = field(default_factory=dict)
    """What P has read back early; taken like a kept turn."""

    def answer(self, status: int, body: Any, **fields: Any) -> LegResult:
        """A worker's answer at the present time."""
        text = body if isinstance(body, bytes) else orjson.dumps(body)
        return LegResult(status=status, body=text, at=self.now, elapsed_seconds=0.25, **fields)

    def run(self, events: Iterable[Event], *, leave_at: int | None = None) -> Seen:
        """Play ``events``; the client leaves before the effect numbered ``leave_at``, if given."""
        exchange = self.role(self.settings, self.pool, self.worker, load=self.load)
        seen = Seen(exchange.receipt)
        run = exchange.run()
        pending = iter([*events, *itertools.repeat(Ended(self.now), 3)])
        response: list[ResponseBody] = []
        try:
            effect = next(run)
            for number in itertools.count():
                if number == leave_at:
                    if isinstance(effect, Call):
                        seen.calls.append(effect)  # it is on its way; the answer will find nobody
                    effect = run.throw(StreamEnded())
                    leave_at = None
                effect = run.send(self._perform(effect, pending, seen, response))
        except StopIteration:
            return seen

    def _perform(self, effect: Effect, pending: Any, seen: Seen, response: list[ResponseBody]) -> Any:
        seen.loads[type(effect)] = dataclasses.replace(self.load)
        match effect:
            case Receive():
                event = next(pending)
                seen.received += 1
                if isinstance(event, ResponseBody):
                    response.append(event)
                return event
            case Call():
                seen.calls.append(effect)
                worker = self.render if effect.leg is Leg.RENDER else self.prefill
                assert worker is not None, f"nobody answers {effect.path}"
                return worker(effect)
            case Take(key):
                return self.returned.pop(key, None) or self.store.take(key)
            case Keep(key, turn) | Restore(key, turn):
                seen.kinds += [effect.kind]
                seen.keeps += [effect] if isinstance(effect, Keep) else []
                keep = self.store.put if isinstance(effect, Keep) else self.store.restore
                dropped = keep(key, turn)
                seen.releases += [Release(drop.turn.handle, drop.turn.model, drop.reason) for drop in dropped]
                return fate(turn, dropped)
            case Release():
                seen.releases.append(effect)
                self.released.append(effect)
            case LearnBlockSize():
                seen.learns.append(effect)
            case ForwardChunk(data):
                seen.client_body += response[-1].data if data is None else data
                seen.answers.append(effect)
            case ForwardRequest() | Reply() | ForwardResponseHeaders() | ForwardTrailers():
                seen.answers.append(effect)
        return None

    # --- events, as Envoy would send them ---------------------------------------------------------------------------

    def request(
        self, body: Any, path: str = "/v1/chat/completions", method: str = "POST", **headers: str
    ) -> list[Event]:
        """A request in two body pieces; header names with underscores for dashes."""
        text = body if isinstance(body, bytes) else orjson.dumps(body)
        named: Headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        pseudo: Headers = ((":method", method), (":path", path), ("x-request-id", "r1"))
        half = len(text) // 2
        return [
            RequestHeaders(pseudo + named, end_of_stream=False, at=self.now),
            RequestBody(text[:half], end_of_stream=False, at=self.now),
            RequestBody(text[half:], end_of_stream=True, at=self.now),
        ]

    def response(
        self, *chunks: bytes, status: str = "200", content_type: str = "text/event-stream", **headers: str
    ) -> list[Event]:
        """A response in these chunks and an empty last one."""
        named: Headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        own: Headers = ((":status", status), ("content-type", content_type))
        return [
            ResponseHeaders(own + named, end_of_stream=False, at=self.now, upstream_address="10.0.0.7:8200"),
            *(ResponseBody(chunk, end_of_stream=False, at=self.now) for chunk in chunks),
            ResponseBody(b"", end_of_stream=True, at=self.now),
        ]


def sse(*messages: Any) -> bytes:
    """Messages as a stream of server-sent events, with vLLM's last one."""
    return b"".join(b"data: " + orjson.dumps(message) + b"\n\n" for message in messages) + b"data: [DONE]\n\n"


def receipt_of(seen: Seen) -> dict[str, str]:
    """The receipt header a client got, as a dictionary."""
    value = header(seen.response_headers.set_headers, "x-kvloop-receipt")
    assert value is not None
    return dict(item.split("=", 1) for item in value.split(", "))
