"""What every role does with an HTTP exchange: receive it, know whose it is, call P for it, answer, and clean up.

An exchange is a generator that does no I/O: it yields ``Effect``s (what to wait for, answer, call, keep) and is sent their
results; a shell performs them (``stream``), a test plays them by hand. So the code of a role reads in the order in which
things happen: see ``exchange`` for the gateway's.

Rules that must stay true of every role:

* Nothing unproven is ever attached: transfer parameters with a handle come from ``reuse.prove`` only.
* A handle that was sent to P, with whatever result, never comes back; if it may be unread, it is released when P cannot be
  reading it any more. A taken one that was not sent is released, or, if the client's own mistake kept it from being sent,
  restored for the corrected request.
* Every message from Envoy is answered once, in order; none is answered after the end of its direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from extproc import headers as names
from extproc import legs
from extproc.admission import Load, Share
from extproc.endpoints import find_endpoint
from extproc.errors import ClientError, EnvoyProtocolError, Overloaded
from extproc.events import (
    Call,
    Effect,
    Ended,
    Event,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
    Headers,
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
    header,
)
from extproc.identity import ConversationKey, IdentityRules, InvalidConversationId, find_conversation, tenant_hash
from extproc.receipt import Outcome, Reason, Receipt, Stage

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.endpoints import Endpoint
    from extproc.pool import PoolKnowledge
    from extproc.request import ApiRequest
    from extproc.settings import GatewaySettings
    from extproc.store import ReturnedTurn, StoredTurn

OK: Final = 200

_LONGEST_LENGTH: Final = 18
"""Digits of a content-length worth converting: an exabyte is too much in any case."""

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect", "host"}
)
_OF_THE_BODY: Final = frozenset({"content-length", "content-type", "content-encoding", "accept", "accept-encoding"})
_NOT_FORWARDED: Final = _HOP_BY_HOP | _OF_THE_BODY | {"x-request-id"}
_NOT_FORWARDED_PREFIXES: Final = (":", names.INTERNAL_PREFIX, "x-envoy-")


class StreamEnded(Exception):
    """Envoy closed the stream, or the client left. Thrown into the generator by the shell when it is cancelled."""


class AnsweredEarly(Exception):
    """The response began before the request had ended."""

    def __init__(self, response: ResponseHeaders) -> None:
        super().__init__()
        self.response = response


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A whole request to one of the handled endpoints."""

    endpoint: Endpoint
    body: bytes
    had_trailers: bool


@dataclass(slots=True)
class HttpExchange(ABC):
    """One HTTP exchange. ``receipt`` is readable at any time; ``run`` may be called once.

    What came is readable as soon as it is here: the request's ``headers`` and when they ``arrived_at``, the ``request``,
    the HTTP ``status`` of its answer and the ``upstream`` (``ip:port``) that gave it. ``worker``: the one P our calls shall
    go to, as Envoy's listener named it; empty means any.
    """

    forwards_to: ClassVar[Leg | Literal["decode"]] = "decode"
    """Which leg it is that goes on through Envoy."""

    settings: GatewaySettings
    pool: PoolKnowledge
    worker: str = ""
    receipt: Receipt = field(default_factory=Receipt)
    load: Load = field(default_factory=Load)
    headers: Headers = ()
    arrived_at: float = 0.0
    request: ApiRequest | None = None
    status: int | None = None
    upstream: str | None = None
    _now: float = 0.0
    _forwarded_at: float = 0.0
    _key: ConversationKey | None = None
    _unsent: StoredTurn | None = None
    _in_doubt: StoredTurn | None = None
    _stage: Stage = Stage.REQUEST
    _ends: bool = False
    _render_refused: bool = False
    _returned: ReturnedTurn | None = None
    _share: Share = field(init=False)
    _prepared_by: float = 0.0

    def __post_init__(self) -> None:
        self._share = Share(self.load)

    def run(self) -> Generator[Effect, Any, None]:
        """Serve the request. Never raises for what a client, a worker or the network does."""
        try:
            yield from self._run()
        finally:
            self._share.leave()

    def _run(self) -> Generator[Effect, Any, None]:
        try:
            yield from self._serve()
        except ClientError as error:
            is_overload = isinstance(error, Overloaded)
            self._conclude(Outcome.REFUSED, Reason.OVERLOADED if is_overload else Reason.CLIENT_ERROR)
            yield self._refusal(error.status, error.body, "application/json", error.headers)
        except StreamEnded:
            self.receipt.abandoned = self._stage
        except Exception:
            yield from self._release_unsent("failed")
            yield from self._release_in_doubt("failed")
            raise
        yield from self._release_unsent("abandoned")
        yield from self._release_in_doubt("abandoned")

    @abstractmethod
    def _serve(self) -> Generator[Effect, Any, None]:
        """Serve the request, as the role does."""

    # --- the request arrives ----------------------------------------------------------------------------------------

    def _receive(self) -> Generator[Effect, Any, Event]:
        event: Event = yield Receive()
        self._now = event.at
        if isinstance(event, Ended):
            raise StreamEnded
        return event

    def _receive_request(self) -> Generator[Effect, Any, ReceivedRequest | None]:
        """Return the request; None if it was none of ours, and has been passed on with its response."""
        opening = yield from self._receive()
        if not isinstance(opening, RequestHeaders):
            # A filter before ours answered by itself; the stream starts with its response.
            yield from self._pass_response(opening)
            return None
        self.headers, self.arrived_at = opening.headers, opening.at
        self._ends = (header(opening.headers, names.END) or "").strip().lower() == "true"
        endpoint = find_endpoint(header(opening.headers, ":method") or "", header(opening.headers, ":path") or "")
        try:
            body, had_trailers = yield from self._collect(opening)
        except AnsweredEarly as early:
            # Envoy gave up on the upload (a time limit, say) and answers by itself.
            self._prepared()
            yield from self._pass_response(early.response)
            return None
        if endpoint is None or body is None:
            yield from self._pass_on(ForwardRequest(body, had_trailers=had_trailers))
            return None
        encoding = header(self.headers, "content-encoding")
        if not is_plain(encoding):
            raise ClientError(415, f"Content-Encoding {encoding} is not supported.", code="unsupported_encoding")
        return ReceivedRequest(endpoint, body, had_trailers)

    def _prepared(self) -> None:
        """Note that the request goes on now: what comes is the worker's time, not ours."""
        self._stage = Stage.DECODE
        self._share.prepared()

    def _pass_on(self, forwarded: ForwardRequest) -> Generator[Effect, Any, None]:
        """Let a request go whose response is none of our business."""
        self._prepared()
        yield forwarded
        yield from self._pass_response((yield from self._receive_response()))

    def _collect(self, opening: RequestHeaders) -> Generator[Effect, Any, tuple[bytes | None, bool]]:
        """Return the whole body (None if there is none) and whether trailers ended it."""
        if opening.end_of_stream:
            return None, False
        self._share.enter(self.settings)
        limit = self.settings.request_max_bytes
        announced = header(opening.headers, "content-length")
        if (
            announced is not None
            and announced.isdecimal()
            and (len(announced) > _LONGEST_LENGTH or int(announced) > limit)
        ):
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            event = yield from self._receive()
            match event:
                case RequestBody():
                    size += len(event.data)
                    if size > limit:
                        raise _too_large(limit)
                    self._share.hold(len(event.data), self.settings)
                    pieces.append(event.data)
                    if event.end_of_stream:
                        return self._whole(pieces), False
                case RequestTrailers():
                    return self._whole(pieces), True
                case ResponseHeaders():
                    raise AnsweredEarly(event)
                case _:
                    raise EnvoyProtocolError(f"{type(event).__name__} arrived inside a request")

    def _whole(self, pieces: list[bytes]) -> bytes:
        """Return the whole body. The time from here until D gets the request is ours."""
        self._prepared_by = self._now + self.settings.preparation_timeout_seconds
        return b"".join(pieces)

    # --- whose it is ------------------------------------------------------------------------------------------------

    def _identify(self, request: ApiRequest) -> None:
        """Find the conversation, and note why reuse is out of the question if it is."""
        settings = self.settings
        rules = IdentityRules(
            settings.conversation_headers,
            settings.conversation_fields,
            settings.tenant_header,
            settings.conversation_id_max_bytes,
            settings.conversation_patterns,
        )
        try:
            self._key = find_conversation(self.headers, request.fields, rules)
        except InvalidConversationId:
            self.receipt.reason = Reason.INVALID_CONVERSATION_ID
        else:
            self.receipt.reason = Reason.NO_CONVERSATION if self._key is None else None
        if self._key is not None:
            self.receipt.conversation = str(self._key)
            self.receipt.reason = self._reuse_ruled_out(request)

    @property
    def _is_first_turn(self) -> bool:
        """Whether nothing was kept for this conversation when the turn came."""
        return self.receipt.held_tokens is None

    def _kind(self) -> str:
        """Name whose habits tell when this conversation comes back: the tenant's, at a first or at a later turn."""
        position = "first" if self._is_first_turn else "later"
        return f"{tenant_hash(self.headers, self.settings.tenant_header)}:{position}"

    def _reuse_ruled_out(self, request: ApiRequest) -> Reason | None:
        if not self.settings.reuse:
            return Reason.REUSE_OFF
        if not self.settings.prefill_bidirectional:
            return Reason.NOT_BIDIRECTIONAL
        if self.pool.prompt_ids_differed:
            return Reason.PROMPT_IDS_DIFFER
        if not legs.is_text_only(request):
            return Reason.NON_TEXT
        return None

    # --- calls and answers of our own -------------------------------------------------------------------------------

    def _call(
        self, leg: Leg, path: str, body: bytes, timeout_seconds: float, attempt: str = ""
    ) -> Generator[Effect, Any, LegResult]:
        request_id = header(self.headers, "x-request-id") or "kvloop"
        forwarded = tuple(
            (name, value)
            for name, value in self.headers
            if name not in _NOT_FORWARDED and not name.startswith(_NOT_FORWARDED_PREFIXES)
        )
        own: Headers = (
            ("content-type", "application/json"),
            # Each attempt is a request of its own to vLLM, which tells requests apart by this id.
            ("x-request-id", "-".join(filter(None, (request_id, leg, attempt)))),
            (names.LEG, leg),
            *(((names.WORKER, self.worker),) if self.worker else ()),
        )
        if self._key is not None and leg is Leg.PREFILL:
            own = (*own, (names.CONVERSATION, str(self._key)))
        remaining_seconds = self._prepared_by - self._now
        if remaining_seconds <= 0:
            return LegResult(status=0, body=b"", at=self._now, elapsed_seconds=0.0, error="timeout")
        self._stage = Stage.PREFILL if leg is Leg.PREFILL else self._stage
        result: LegResult = yield Call(leg, path, forwarded + own, body, min(timeout_seconds, remaining_seconds))
        self._now = result.at
        return result

    def _secret_headers(self) -> Headers:
        """Return what makes a worker's guard accept transfer parameters."""
        secret = self.settings.worker_secret
        return () if secret is None else ((names.SECRET, secret.get_secret_value()),)

    def _release_unsent(self, reason: str) -> Generator[Effect, Any, None]:
        turn, self._unsent = self._unsent, None
        if turn is not None:
            yield Release(turn.handle, turn.model, reason)

    def _restore_unsent(self) -> Generator[Effect, Any, None]:
        """Give the kept turn back for the corrected request; its handle has not been sent."""
        if self._ends:
            yield from self._release_unsent("ended")
        turn, self._unsent = self._unsent, None
        if turn is not None and self._key is not None:
            yield Restore(self._key, turn, self._kind())

    def _release_in_doubt(self, reason: str) -> Generator[Effect, Any, None]:
        """Have D free what was sent to P and perhaps not read, once P cannot be reading it any more.

        A P that is cut off may go on reading for a moment. If D freed the blocks meanwhile and used them anew, P would
        read the wrong KV, and keep it if it had not yet noticed that nobody waits.
        """
        turn, self._in_doubt = self._in_doubt, None
        if turn is not None:
            yield Release(turn.handle, turn.model, reason, self.settings.reuse_timeout_seconds)

    def _conclude(self, outcome: Outcome, reason: Reason | None) -> None:
        self.receipt.outcome, self.receipt.reason = outcome, reason

    def _refusal(self, status: int, body: bytes, content_type: str, more: Headers = ()) -> Reply:
        self.status = status
        headers = (("content-type", content_type), (names.RECEIPT, self.receipt.header_value()), *more)
        return Reply(status, body, headers, self.receipt.metadata())

    # --- the response -----------------------------------------------------------------------------------------------

    def _receive_response(self) -> Generator[Effect, Any, Event]:
        """Wait for the response; a repeated end of the request (seen on some Envoys) wants no answer."""
        event = yield from self._receive()
        while isinstance(event, RequestBody | RequestTrailers):
            event = yield from self._receive()
        return event

    def _pass_response(self, event: Event) -> Generator[Effect, Any, None]:
        """Let a response go that is none of our business, whatever part of it comes first."""
        while True:
            match event:
                case ResponseHeaders():
                    yield ForwardResponseHeaders(watch=False)
                case ResponseBody(end_of_stream=end):
                    yield ForwardChunk()
                    if end:
                        return
                case ResponseTrailers():
                    yield ForwardTrailers()
                    return
                case _:
                    raise EnvoyProtocolError(f"{type(event).__name__} arrived inside a response")
            event = yield from self._receive()


def is_plain(content_encoding: str | None) -> bool:
    """Tell whether a body so encoded can be read as it is."""
    return content_encoding is None or content_encoding.strip().lower() in ("", "identity")


def _too_large(limit: int) -> ClientError:
    return ClientError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
