"""The life of one request, from Envoy's first message to its last: a generator that does no I/O.

It yields ``Effect``s (what to wait for, answer, call, keep) and is sent their results; a shell performs them
(``server``), a test plays them by hand. So the code below reads in the order in which things happen.

Rules that must stay true:

* Nothing unproven is ever attached: transfer parameters with a handle come from ``reuse.prove`` only.
* A handle that was sent to P, with whatever result, never comes back. A taken one that was not sent is released.
* Every message from Envoy is answered once, in order; none is answered after the end of its direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from extproc import handle as handles
from extproc import headers as names
from extproc import legs, proof
from extproc.endpoints import find_endpoint
from extproc.errors import ClientError, EnvoyProtocolError
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
    Keep,
    LearnBlockSize,
    Leg,
    LegResult,
    Receive,
    Refuse,
    Release,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Take,
    header,
)
from extproc.identity import ConversationKey, IdentityRules, InvalidConversationId, find_conversation
from extproc.receipt import Outcome, Reason, Receipt
from extproc.request import ApiRequest, parse_request
from extproc.reuse import Attachment, prove
from extproc.store import StoredTurn
from extproc.turn import Learned, StreamedTurn, TurnFold, Watch, WholeTurn

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.pool import PoolKnowledge
    from extproc.settings import GatewaySettings

OK: Final = 200
CLIENT_ERRORS: Final = frozenset({400, 401, 403, 404, 413, 422})
"""P's answers that are the client's to mend: passed on unchanged, and no decode leg is sent."""

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
class DecodeLeg:
    """What D gets. Without ``params`` it is the client's plain request, and its answer needs no watching."""

    params: bytes | None = None
    prompt_ids: bytes | None = None


@dataclass(slots=True)
class Exchange:
    """One HTTP exchange. ``receipt`` is readable at any time; ``run`` may be called once."""

    settings: GatewaySettings
    pool: PoolKnowledge
    receipt: Receipt = field(default_factory=Receipt)
    _now: float = 0.0
    _arrived_at: float = 0.0
    _forwarded_at: float = 0.0
    _headers: Headers = ()
    _key: ConversationKey | None = None
    _unsent: StoredTurn | None = None

    def run(self) -> Generator[Effect, Any, None]:
        """Serve the request. Never raises for what a client, a worker or the network does."""
        try:
            yield from self._serve()
        except ClientError as error:
            self.receipt.outcome, self.receipt.reason = Outcome.REFUSED, Reason.CLIENT_ERROR
            yield self._refusal(error.status, error.body, "application/json")
        except StreamEnded:
            pass
        except Exception:
            yield from self._release_unsent("failed")
            raise
        yield from self._release_unsent("abandoned")

    def _serve(self) -> Generator[Effect, Any, None]:
        opening = yield from self._receive()
        if not isinstance(opening, RequestHeaders):
            # A filter before ours answered by itself; the stream starts with its response.
            yield from self._pass_response(opening)
            return
        self._headers, self._arrived_at = opening.headers, opening.at
        endpoint = find_endpoint(header(opening.headers, ":method") or "", header(opening.headers, ":path") or "")
        try:
            body, had_trailers = yield from self._collect(opening)
        except AnsweredEarly as early:
            # Envoy gave up on the upload (a time limit, say) and answers by itself.
            yield from self._pass_response(early.response)
            return
        if endpoint is None or body is None:
            yield ForwardRequest(body, had_trailers=had_trailers)
            yield from self._pass_response((yield from self._receive_response()))
            return
        request = parse_request(endpoint, body)
        self.receipt.forbidden_fields_removed = request.forbidden_fields_removed
        leg = yield from self._route(request)
        if leg is None:
            return
        asked = leg.params is not None and self._wants_token_ids()
        self._forwarded_at = self._now
        yield ForwardRequest(
            legs.decode_body(request, leg.params, leg.prompt_ids, ask_token_ids=asked),
            set_headers=self._decode_headers(leg),
            # A compressed answer could be neither read nor stripped.
            remove_headers=("accept-encoding",) if leg.params is not None else (),
            had_trailers=had_trailers,
        )
        yield from self._respond(request, leg, asked=asked)

    # --- the request arrives ----------------------------------------------------------------------------------------

    def _receive(self) -> Generator[Effect, Any, Event]:
        event: Event = yield Receive()
        self._now = event.at
        if isinstance(event, Ended):
            raise StreamEnded
        return event

    def _collect(self, opening: RequestHeaders) -> Generator[Effect, Any, tuple[bytes | None, bool]]:
        """Return the whole body (None if there is none) and whether trailers ended it."""
        if opening.end_of_stream:
            return None, False
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
                    pieces.append(event.data)
                    if event.end_of_stream:
                        return b"".join(pieces), False
                case RequestTrailers():
                    return b"".join(pieces), True
                case ResponseHeaders():
                    raise AnsweredEarly(event)
                case _:
                    raise EnvoyProtocolError(f"{type(event).__name__} arrived inside a request")

    # --- the route: reuse, cold, or D alone -------------------------------------------------------------------------

    def _route(self, request: ApiRequest) -> Generator[Effect, Any, DecodeLeg | None]:
        """Run the prefill leg; None when the client has been answered already."""
        encoding = header(self._headers, "content-encoding")
        if not _is_plain(encoding):
            raise ClientError(415, f"Content-Encoding {encoding} is not supported.", code="unsupported_encoding")
        alone = legs.plan_decode_alone(request)
        if alone is not None:
            self.receipt.outcome, self.receipt.reason = Outcome.DECODE_ONLY, alone
            return DecodeLeg()
        self._identify(request)
        prompt_ids, attachment = yield from self._find_reuse(request)
        ids_text = None if prompt_ids is None else orjson.dumps(prompt_ids)
        if attachment is not None:
            prefilled = yield from self._prefill_reusing(request, attachment, prompt_ids, ids_text)
            if prefilled is not None:
                return prefilled
        return (yield from self._prefill_cold(request, prompt_ids, ids_text))

    def _identify(self, request: ApiRequest) -> None:
        """Find the conversation, and note why reuse is out of the question if it is."""
        settings = self.settings
        rules = IdentityRules(
            settings.conversation_headers,
            settings.conversation_fields,
            settings.tenant_header,
            settings.conversation_id_max_bytes,
        )
        try:
            self._key = find_conversation(self._headers, request.fields, rules)
        except InvalidConversationId:
            self.receipt.reason = Reason.INVALID_CONVERSATION_ID
        else:
            self.receipt.reason = Reason.NO_CONVERSATION if self._key is None else None
        if self._key is not None:
            self.receipt.conversation = str(self._key)
            self.receipt.reason = self._reuse_ruled_out(request)

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

    def _find_reuse(self, request: ApiRequest) -> Generator[Effect, Any, tuple[list[int] | None, Attachment | None]]:
        """Return the prompt's token ids (None: P shall tokenise) and what may be attached to them."""
        if self._key is None or self.receipt.reason is not None:
            return request.token_id_prompt, None
        turn: StoredTurn | None = yield Take(self._key)
        if turn is None:
            self.receipt.reason = Reason.NOTHING_KEPT
            return request.token_id_prompt, None
        self._unsent = turn
        self.receipt.held_tokens = turn.handle.tokens
        prompt_ids = request.token_id_prompt
        if prompt_ids is None:
            prompt_ids = yield from self._render(request)
        verdict = self._verdict(turn, prompt_ids)
        if isinstance(verdict, Attachment):
            return prompt_ids, verdict
        self.receipt.reason = verdict
        yield from self._release_unsent(verdict)
        return prompt_ids, None

    def _verdict(self, turn: StoredTurn, prompt_ids: list[int] | None) -> Attachment | Reason:
        if prompt_ids is None:
            return Reason.RENDER_FAILED
        if turn.deadline <= self._now:
            return Reason.EXPIRED
        block_size = (
            turn.block_size_tokens
            or self.pool.block_size_tokens(turn.handle.engine_id)
            or self.settings.decode_block_size_tokens
        )
        minimum = self.settings.min_reuse_tokens
        return prove(turn, prompt_ids, block_size_tokens=block_size, min_tokens=minimum)

    def _render(self, request: ApiRequest) -> Generator[Effect, Any, list[int] | None]:
        path, body = request.endpoint.render_path, legs.render_body(request)
        result = yield from self._call(Leg.RENDER, path, body, self.settings.render_timeout_seconds)
        self.receipt.render_ms = result.elapsed_seconds * 1000
        return legs.read_rendered(result.body) if result.status == OK else None

    # --- the prefill leg, and the ladder down from it ---------------------------------------------------------------

    def _prefill_reusing(
        self, request: ApiRequest, attachment: Attachment, prompt_ids: list[int] | None, ids_text: bytes | None
    ) -> Generator[Effect, Any, DecodeLeg | None]:
        """Let P read the handle; None when the turn has to be tried again without it."""
        turn, self._unsent = self._unsent, None
        body = legs.prefill_body(request, attachment.params, ids_text)
        result = yield from self._call(
            Leg.PREFILL, request.endpoint.path, body, self.settings.reuse_timeout_seconds, attempt="reuse"
        )
        self.receipt.prefill_ms = result.elapsed_seconds * 1000
        if result.status in CLIENT_ERRORS:
            # P's front refused the request, so its engine read nothing and never will: D need not wait for it.
            self._unsent = turn
            yield from self._release_unsent("refused")
        prefilled = legs.read_prefilled(result.body) if result.status == OK else None
        if prefilled is None:
            self.receipt.reason = _failure(result)
            return None
        if prefilled.prompt_ids != prompt_ids:
            # P's KV mixes tokens nobody proved with the handle's. Nothing of it may be used, now or later.
            self.pool.prompt_ids_differed = True
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        read = attachment.tokens if prefilled.cached_tokens is None else prefilled.cached_tokens
        # Short of the rest P's own cache had the start of it, and what was left was not worth a read to P.
        if attachment.tokens - read >= self.settings.min_reuse_tokens:
            self._conclude(Outcome.COLD, Reason.READ_FAILED)
        elif attachment.is_whole:
            self._conclude(Outcome.REUSED, None)
        else:
            self._conclude(Outcome.PARTIAL, Reason.HISTORY_DIFFERS)
        # P counts what its own prefix cache had, too; no more than what was attached can have come from D.
        self.receipt.reused_tokens = min(read, attachment.tokens)
        self.receipt.cached_tokens = prefilled.cached_tokens
        self.receipt.prompt_tokens = len(prefilled.prompt_ids or ())
        return DecodeLeg(prefilled.params, ids_text)

    def _prefill_cold(
        self, request: ApiRequest, prompt_ids: list[int] | None, ids_text: bytes | None
    ) -> Generator[Effect, Any, DecodeLeg | None]:
        body = legs.prefill_body(request, handles.COLD_PREFILL, ids_text)
        result = yield from self._call(
            Leg.PREFILL, request.endpoint.path, body, self.settings.prefill_timeout_seconds, attempt="cold"
        )
        self.receipt.prefill_ms = (self.receipt.prefill_ms or 0.0) + result.elapsed_seconds * 1000
        if result.status in CLIENT_ERRORS:
            self._conclude(Outcome.REFUSED, Reason.CLIENT_ERROR)
            yield self._refusal(result.status, result.body, result.content_type)
            return None
        prefilled = legs.read_prefilled(result.body) if result.status == OK else None
        if prefilled is None:
            return self._decode_alone(_failure(result), ids_text)
        if prompt_ids is not None and prefilled.prompt_ids != prompt_ids:
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        self._conclude(Outcome.COLD, self.receipt.reason)
        self.receipt.reused_tokens = 0
        self.receipt.cached_tokens = prefilled.cached_tokens
        self.receipt.prompt_tokens = None if prefilled.prompt_ids is None else len(prefilled.prompt_ids)
        if ids_text is None and prefilled.prompt_ids is not None and legs.is_text_only(request):
            ids_text = orjson.dumps(prefilled.prompt_ids)
        return DecodeLeg(prefilled.params, ids_text)

    def _refusal(self, status: int, body: bytes, content_type: str) -> Refuse:
        headers = (("content-type", content_type), (names.RECEIPT, self.receipt.header_value()))
        return Refuse(status, body, headers, self.receipt.metadata())

    def _decode_alone(self, reason: Reason, ids_text: bytes | None) -> DecodeLeg:
        """Let D prefill by itself; if it has our plugin, its handle serves the next turn all the same."""
        self._conclude(Outcome.DECODE_ONLY, reason)
        return DecodeLeg(handles.DECODE_ALONE, ids_text) if self.pool.plugin_everywhere else DecodeLeg()

    def _conclude(self, outcome: Outcome, reason: Reason | None) -> None:
        self.receipt.outcome, self.receipt.reason = outcome, reason

    def _call(
        self, leg: Leg, path: str, body: bytes, timeout_seconds: float, attempt: str = ""
    ) -> Generator[Effect, Any, LegResult]:
        request_id = header(self._headers, "x-request-id") or "kvloop"
        forwarded = tuple(
            (name, value)
            for name, value in self._headers
            if name not in _NOT_FORWARDED and not name.startswith(_NOT_FORWARDED_PREFIXES)
        )
        own: Headers = (
            ("content-type", "application/json"),
            # Each attempt is a request of its own to vLLM, which tells requests apart by this id.
            ("x-request-id", "-".join(filter(None, (request_id, leg, attempt)))),
            (names.LEG, leg),
        )
        result: LegResult = yield Call(leg, path, forwarded + own, body, timeout_seconds)
        self._now = result.at
        return result

    def _release_unsent(self, reason: str) -> Generator[Effect, Any, None]:
        turn, self._unsent = self._unsent, None
        if turn is not None:
            yield Release(turn.handle, turn.model, reason)

    # --- the decode leg and its response ----------------------------------------------------------------------------

    def _wants_token_ids(self) -> bool:
        """Whether D has to send token ids for the next turn's proof."""
        if self._key is None or not self.settings.reuse:
            return False
        source = self.settings.sequence_source
        return source == "token_ids" or (source == "auto" and not self.pool.digest_seen)

    def _decode_headers(self, leg: DecodeLeg) -> Headers:
        """Headers that let Envoy pick the conversation's D, and D's guard accept the transfer parameters."""
        conversation: Headers = () if self._key is None else ((names.CONVERSATION, str(self._key)),)
        secret = self.settings.worker_secret
        if secret is None or leg.params is None:
            return conversation
        return (*conversation, (names.SECRET, secret.get_secret_value()))

    def _receive_response(self) -> Generator[Effect, Any, Event]:
        """Wait for the response; a repeated end of the request (seen on some Envoys) wants no answer."""
        event = yield from self._receive()
        while isinstance(event, RequestBody | RequestTrailers):
            event = yield from self._receive()
        return event

    def _respond(self, request: ApiRequest, leg: DecodeLeg, *, asked: bool) -> Generator[Effect, Any, None]:
        event = yield from self._receive_response()
        if not isinstance(event, ResponseHeaders):
            raise EnvoyProtocolError(f"{type(event).__name__} arrived instead of response headers")
        learns = asked or request.wants_token_ids
        hides = asked and not request.wants_token_ids
        settings = self.settings
        watch = Watch(learns, hides, settings.event_max_bytes, settings.response_max_bytes)
        fold = None if leg.params is None else _fold_for(event, watch)
        yield ForwardResponseHeaders(
            watch=fold is not None,
            set_headers=((names.RECEIPT, self.receipt.header_value()),),
            metadata=self.receipt.metadata(),
        )
        if fold is not None:
            yield from self._watch(request, fold, event.upstream_address)

    def _watch(self, request: ApiRequest, fold: TurnFold, upstream: str | None) -> Generator[Effect, Any, None]:
        is_first = isinstance(fold, StreamedTurn)
        while True:
            event = yield from self._receive()
            match event:
                case ResponseBody(data, end):
                    if is_first:
                        is_first = False
                        self._note_first_token()
                    replacement = fold.feed(data, end=end)
                    if fold.learned.published is not None and self.receipt.captured is None:
                        # Kept before the client can see the end of this turn, and so before it can send the next one.
                        yield from self._capture(request, fold.learned, upstream)
                        yield ForwardChunk(replacement, {"captured": self.receipt.captured})
                    else:
                        yield ForwardChunk(replacement)
                    if end:
                        return
                case ResponseTrailers():
                    if fold.holds_bytes:
                        # Too late to send them; an aborted answer is better than one that lacks its end unnoticed.
                        raise EnvoyProtocolError("trailers ended a response that was still being held")
                    yield ForwardTrailers()
                    return
                case _:
                    raise EnvoyProtocolError(f"{type(event).__name__} arrived inside a response")

    def _note_first_token(self) -> None:
        self.receipt.decode_ms = (self._now - self._forwarded_at) * 1000
        self.receipt.ttft_ms = (self._now - self._arrived_at) * 1000

    def _capture(self, request: ApiRequest, learned: Learned, upstream: str | None) -> Generator[Effect, Any, None]:
        """Keep the handle D published for the next turn, or have D free its blocks."""
        assert learned.published is not None  # noqa: S101 - checked by the caller
        if len(learned.published) > self.settings.handle_max_bytes:
            self.receipt.captured = "too_large"
            return
        try:
            publication = handles.read_publication(learned.published)
        except handles.HandleRefused as refused:
            self.receipt.captured = refused.reason
            return
        handle = publication.handle
        if handle.is_loopback and not self.settings.single_host:
            # P would look for D on its own machine; not even a release would find it.
            self.receipt.captured = "loopback_host"
            return
        if legs.is_text_only(request):  # the plugin leaves other turns without a digest
            self.pool.note_handle(has_digest=publication.sequence is not None)
        sequence = self._sequence(publication, learned)
        ruled_out = self._reuse_ruled_out(request)
        if self._key is None or ruled_out is not None or sequence is None:
            self.receipt.captured = "released"
            yield Release(handle, request.model, str(ruled_out or "no_sequence" if self._key else "no_conversation"))
            return
        if publication.block_size_tokens is None and self.pool.block_size_tokens(handle.engine_id) is None and upstream:
            yield LearnBlockSize(handle.engine_id, upstream)
        # D's clock started when it finished, which nobody told us: a client that reads slowly may have held the finish
        # chunk back for minutes. It cannot have finished before it had the request.
        deadline = self._forwarded_at + self.settings.handle_ttl_seconds - self.settings.handle_margin_seconds
        if deadline <= self._now:
            self.receipt.captured = "released"
            yield Release(handle, request.model, "expired")
            return
        turn = StoredTurn(handle, sequence, publication.block_size_tokens, request.model, deadline)
        yield Keep(self._key, turn)
        self.receipt.captured = "kept"

    def _sequence(self, publication: handles.Publication, learned: Learned) -> proof.Sequence | None:
        """Return the tokens behind the handle: D's own digest, else the ids it streamed.

        The last generated token has no KV yet, or (asynchronous scheduling, after a stop) has it already; it never counts.
        If the counts disagree otherwise some ids were withheld (hidden reasoning, say), and only the prompt's are sure to
        be the leading ones.
        """
        if publication.sequence is not None:
            return publication.sequence
        if learned.prompt_ids is None:
            return None
        tokens = publication.handle.tokens
        ids = learned.prompt_ids + learned.generated_ids
        try:
            return proof.fingerprint(ids[:-1] if tokens in (len(ids) - 1, len(ids)) else learned.prompt_ids[:tokens])
        except (OverflowError, TypeError):
            return None

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


def _fold_for(event: ResponseHeaders, watch: Watch) -> TurnFold | None:
    """Choose how to read a response; None when there is nothing to read in it."""
    if header(event.headers, ":status") != str(OK) or event.end_of_stream:
        return None
    if not _is_plain(header(event.headers, "content-encoding")):
        return None
    media_type = (header(event.headers, "content-type") or "").partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return StreamedTurn(watch)
    return WholeTurn(watch) if media_type == "application/json" else None


def _is_plain(content_encoding: str | None) -> bool:
    return content_encoding is None or content_encoding.strip().lower() in ("", "identity")


def _failure(result: LegResult) -> Reason:
    if result.error == "timeout":
        return Reason.PREFILL_TIMEOUT
    if result.error:
        return Reason.PREFILL_UNREACHABLE
    return Reason.PREFILL_WITHOUT_KV if result.status == OK else Reason.PREFILL_FAILED


def _too_large(limit: int) -> ClientError:
    return ClientError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
