"""Watch D's response: keep the handle it publishes for the next turn, and hide what nobody but kvloop asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc import handle as handles
from extproc import headers as names
from extproc import legs, proof
from extproc.errors import EnvoyProtocolError
from extproc.events import (
    Effect,
    ForwardChunk,
    ForwardResponseHeaders,
    ForwardTrailers,
    Keep,
    LearnBlockSize,
    Release,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    header,
)
from extproc.handle_hosts import host_rules
from extproc.http_exchange import OK, HttpExchange, is_plain
from extproc.receipt import Stage
from extproc.store import StoredTurn
from extproc.turn import Learned, StreamedTurn, TurnFold, Watch, WholeTurn

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.events import Headers, Returning
    from extproc.identity import ConversationKey
    from extproc.request import ApiRequest


class CapturingExchange(HttpExchange):
    """An exchange whose response may bring a handle."""

    __slots__ = ()

    @property
    def _is_followed(self) -> bool:
        """Whether a next turn could find what this one leaves."""
        return self._key is not None

    def _wants_token_ids(self) -> bool:
        """Whether D has to send token ids for the next turn's proof."""
        if not self._is_followed or self._ends or not self.settings.reuse:
            return False
        source = self.settings.sequence_source
        return source == "token_ids" or (source == "auto" and not self.pool.digest_seen)

    def _decode_headers(self, *, with_params: bool) -> Headers:
        """Headers that let Envoy pick the conversation's D, and D's guard accept the transfer parameters."""
        conversation: Headers = () if self._key is None else ((names.CONVERSATION, str(self._key)),)
        return (*conversation, *self._secret_headers()) if with_params else conversation

    def _removed_headers(self, *, with_params: bool) -> tuple[str, ...]:
        ours = (names.END,) if self._ends else ()
        # A compressed answer could be neither read nor stripped.
        return (*ours, "accept-encoding") if with_params else ours

    def _respond(self, request: ApiRequest, *, watches: bool, asked: bool) -> Generator[Effect, Any, None]:
        event = yield from self._receive_response()
        if not isinstance(event, ResponseHeaders):
            raise EnvoyProtocolError(f"{type(event).__name__} arrived instead of response headers")
        status = header(event.headers, ":status") or ""
        self.status = int(status) if status.isdecimal() else None
        self.upstream = event.upstream_address
        learns = asked or request.wants_token_ids
        hides = asked and not request.wants_token_ids
        settings = self.settings
        watch = Watch(learns, hides, settings.event_max_bytes, settings.response_max_bytes, self._shown_params)
        fold = _fold_for(event, watch) if watches else None
        yield ForwardResponseHeaders(
            watch=fold is not None,
            set_headers=((names.RECEIPT, self._receipt_header()),),
            metadata=self.receipt.metadata(),
        )
        if fold is not None:
            yield from self._watch(request, fold, event.upstream_address)

    def _watch(self, request: ApiRequest, fold: TurnFold, upstream: str | None) -> Generator[Effect, Any, None]:
        self._stage = Stage.RESPONSE
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
                    elif end and self.receipt.captured is None:
                        # A stop string, an abort, or a D that never publishes: docs/hazards.md, 32 and 33.
                        self.receipt.captured = "absent"
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

    def _shown_params(self, params: bytes) -> bytes | None:  # noqa: ARG002 - roles may look at them
        """Return what the reader gets in place of D's transfer parameters (JSON text): nothing."""
        return None

    def _receipt_header(self) -> str:
        return self.receipt.header_value()

    def _note_first_token(self) -> None:
        self.receipt.decode_ms = (self._now - self._forwarded_at) * 1000
        self.receipt.ttft_ms = (self._now - self.arrived_at) * 1000

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
        if self._refuses_host(handle, upstream):
            return
        if legs.is_text_only(request):  # the plugin leaves other turns without a digest
            self.pool.note_handle(has_digest=publication.sequence is not None)
        sequence = self._sequence(publication, learned)
        key = self._key_of(handle)
        unwanted = "no_conversation" if key is None else self._unwanted(request, handle)
        if unwanted is None:
            unwanted = "no_sequence" if sequence is None else self._doubt(publication, sequence, learned)
        if key is None or sequence is None or unwanted is not None:
            self.receipt.captured = "released"
            yield Release(handle, request.model, str(unwanted))
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
        keep = Keep(key, turn, self._kind(), upstream, self._return_plan(request, turn, learned))
        self.receipt.captured = yield keep

    def _key_of(self, handle: handles.Handle) -> ConversationKey | None:  # noqa: ARG002 - roles may look at it
        """Return the key under which the next turn will look for this handle."""
        return self._key

    def _return_plan(
        self,
        request: ApiRequest,  # noqa: ARG002 - roles may look at them
        turn: StoredTurn,  # noqa: ARG002
        learned: Learned,  # noqa: ARG002
    ) -> Returning | None:
        """Return how to have P read this turn back right away: it shall not."""
        return None

    def _unwanted(self, request: ApiRequest, handle: handles.Handle) -> str | None:
        """Name why no later turn will read what D retains, None if one may."""
        if self._ends:
            return "ended"
        if handle.engine_id in self.pool.draining_engines:
            return "engine_draining"
        ruled_out = self._reuse_ruled_out(request)
        return None if ruled_out is None else str(ruled_out)

    def _doubt(
        self,
        publication: handles.Publication,  # noqa: ARG002 - roles may look at them
        sequence: proof.Sequence,  # noqa: ARG002
        learned: Learned,  # noqa: ARG002
    ) -> str | None:
        """Name why D's word on its tokens is not to be taken, None if it is."""
        return None

    def _refuses_host(self, handle: handles.Handle, upstream: str | None) -> bool:
        """Whether P must not be sent where this handle says: put down why. Not even a release would go to the right D."""
        if handle.is_loopback:
            if self.settings.single_host:
                return False
            self.receipt.captured = "loopback_host"
        elif host_rules(self.settings.handle_hosts).allows(handle.host):
            return False
        else:
            self.receipt.captured = "foreign_host"
        self.receipt.refused_host = f"{handle.host} from {upstream}" if upstream else handle.host
        return True

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


def _fold_for(event: ResponseHeaders, watch: Watch) -> TurnFold | None:
    """Choose how to read a response; None when there is nothing to read in it."""
    if header(event.headers, ":status") != str(OK) or event.end_of_stream:
        return None
    if not is_plain(header(event.headers, "content-encoding")):
        return None
    media_type = (header(event.headers, "content-type") or "").partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return StreamedTurn(watch)
    return WholeTurn(watch) if media_type == "application/json" else None
