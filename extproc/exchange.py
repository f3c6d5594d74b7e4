"""The life of one request in the role ``gateway``, from Envoy's first message to its last: a generator that does no I/O.

Read ``_serve`` and ``_route`` here; what they share with the other roles stands in ``http_exchange`` (receiving, calling,
answering), ``attaching`` (what may be attached to a prompt) and ``capturing`` (what D's response brings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from extproc import handle as handles
from extproc import headers as names
from extproc import legs
from extproc.attaching import CLIENT_ERRORS, AttachingExchange, failure
from extproc.capturing import CapturingExchange
from extproc.endpoints import find_endpoint
from extproc.errors import ClientError
from extproc.events import Effect, ForwardRequest, Headers, Leg, RequestHeaders, header
from extproc.http_exchange import OK, AnsweredEarly, is_plain
from extproc.receipt import Outcome, Reason
from extproc.request import ApiRequest, parse_request

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.reuse import Attachment


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """What D gets. Without ``params`` it is the client's plain request, and its answer needs no watching."""

    params: bytes | None = None
    prompt_ids: bytes | None = None


class Exchange(AttachingExchange, CapturingExchange):
    """One request that kvloop takes to P and to D."""

    __slots__ = ()

    def _serve(self) -> Generator[Effect, Any, None]:
        opening = yield from self._receive()
        if not isinstance(opening, RequestHeaders):
            # A filter before ours answered by itself; the stream starts with its response.
            yield from self._pass_response(opening)
            return
        self.headers, self.arrived_at = opening.headers, opening.at
        self._ends = (header(opening.headers, names.END) or "").strip().lower() == "true"
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
        self.request = request = parse_request(endpoint, body)
        self.receipt.forbidden_fields_removed = request.forbidden_fields_removed
        leg = yield from self._route(request)
        if leg is None:
            return
        asked = leg.params is not None and self._wants_token_ids()
        self._forwarded_at = self._now
        yield ForwardRequest(
            legs.decode_body(request, leg.params, leg.prompt_ids, ask_token_ids=asked),
            set_headers=self._decode_headers(leg),
            remove_headers=self._removed_headers(leg),
            had_trailers=had_trailers,
        )
        yield from self._respond(request, watches=leg.params is not None, asked=asked)

    # --- the route: reuse, cold, or D alone -------------------------------------------------------------------------

    def _route(self, request: ApiRequest) -> Generator[Effect, Any, DecodeLeg | None]:
        """Run the prefill leg; None when the client has been answered already."""
        encoding = header(self.headers, "content-encoding")
        if not is_plain(encoding):
            raise ClientError(415, f"Content-Encoding {encoding} is not supported.", code="unsupported_encoding")
        alone = legs.plan_decode_alone(request)
        if alone is not None:
            if self._ends:
                self._identify(request)
                yield from self._discard_kept()
            self._conclude(Outcome.DECODE_ONLY, alone)
            return DecodeLeg()
        self._identify(request)
        prompt_ids, attachment = yield from self._find_reuse(request)
        ids_text = None if prompt_ids is None else orjson.dumps(prompt_ids)
        if attachment is not None:
            prefilled = yield from self._prefill_reusing(request, attachment, prompt_ids, ids_text)
            if prefilled is not None:
                return prefilled
        return (yield from self._prefill_cold(request, prompt_ids, ids_text))

    # --- the prefill leg, and the ladder down from it ---------------------------------------------------------------

    def _prefill_reusing(
        self, request: ApiRequest, attachment: Attachment, prompt_ids: list[int] | None, ids_text: bytes | None
    ) -> Generator[Effect, Any, DecodeLeg | None]:
        """Let P read the handle; None when the turn has to be tried again without it."""
        body = legs.prefill_body(request, attachment.params, ids_text)
        _, prefilled = yield from self._call_attached(request, body)
        if prefilled is None:
            return None
        if prefilled.prompt_ids != prompt_ids:
            # P's KV mixes tokens nobody proved with the handle's. Nothing of it may be used, now or later.
            self.pool.prompt_ids_differed = True
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        self._note_reuse(attachment, prefilled)
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
            yield from self._restore_unsent()
            self._conclude(Outcome.REFUSED, Reason.CLIENT_ERROR)
            yield self._refusal(result.status, result.body, result.content_type)
            return None
        yield from self._release_unsent(Reason.RENDER_FAILED)
        prefilled = legs.read_prefilled(result.body) if result.status == OK else None
        if prefilled is None:
            return self._decode_alone(failure(result), ids_text)
        if prompt_ids is not None and prefilled.prompt_ids != prompt_ids:
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        self._conclude(Outcome.COLD, self.receipt.reason)
        self.receipt.reused_tokens = 0
        self.receipt.cached_tokens = prefilled.cached_tokens
        self.receipt.prompt_tokens = None if prefilled.prompt_ids is None else len(prefilled.prompt_ids)
        if ids_text is None and prefilled.prompt_ids is not None and legs.is_text_only(request):
            ids_text = orjson.dumps(prefilled.prompt_ids)
        return DecodeLeg(prefilled.params, ids_text)

    def _decode_alone(self, reason: Reason, ids_text: bytes | None) -> DecodeLeg:
        """Let D prefill by itself; if it has our plugin, its handle serves the next turn all the same."""
        self._conclude(Outcome.DECODE_ONLY, reason)
        return DecodeLeg(handles.DECODE_ALONE, ids_text) if self.pool.plugin_everywhere else DecodeLeg()

    def _decode_headers(self, leg: DecodeLeg) -> Headers:
        """Headers that let Envoy pick the conversation's D, and D's guard accept the transfer parameters."""
        conversation: Headers = () if self._key is None else ((names.CONVERSATION, str(self._key)),)
        secret = self.settings.worker_secret
        if secret is None or leg.params is None:
            return conversation
        return (*conversation, (names.SECRET, secret.get_secret_value()))

    def _removed_headers(self, leg: DecodeLeg) -> tuple[str, ...]:
        ours = (names.END,) if self._ends else ()
        # A compressed answer could be neither read nor stripped.
        return ours if leg.params is None else (*ours, "accept-encoding")
