"""The life of one request in the role ``gateway``, from Envoy's first message to its last: a generator that does no I/O.

Read ``_serve`` and ``_route`` here; what they share with the other roles stands in ``http_exchange`` (receiving, calling,
answering), ``attaching`` (what may be attached to a prompt), ``capturing`` (what D's response brings) and ``returning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from extproc import handle as handles
from extproc import legs
from extproc.attaching import CLIENT_ERRORS, AttachingExchange, failure
from extproc.events import Effect, ForwardRequest
from extproc.receipt import Outcome, Reason
from extproc.request import ApiRequest, parse_request
from extproc.returning import ReturningExchange

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.reuse import Attachment


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """What D gets. Without ``params`` it is the client's plain request, and its answer needs no watching."""

    params: bytes | None = None
    prompt_ids: bytes | None = None


class Exchange(AttachingExchange, ReturningExchange):
    """One request that kvloop takes to P and to D."""

    __slots__ = ()

    def _serve(self) -> Generator[Effect, Any, None]:
        received = yield from self._receive_request()
        if received is None:
            return
        self.request = request = parse_request(received.endpoint, received.body)
        self.receipt.forbidden_fields_removed = request.forbidden_fields_removed
        leg = yield from self._route(request)
        if leg is None:
            return
        watches = leg.params is not None
        asked = watches and self._wants_token_ids()
        self._forwarded_at = self._now
        self._prepared()
        yield ForwardRequest(
            legs.decode_body(request, leg.params, leg.prompt_ids, ask_token_ids=asked),
            set_headers=self._decode_headers(with_params=watches),
            remove_headers=self._removed_headers(with_params=watches),
            had_trailers=received.had_trailers,
        )
        yield from self._respond(request, watches=watches, asked=asked)

    # --- the route: reuse, cold, or D alone -------------------------------------------------------------------------

    def _route(self, request: ApiRequest) -> Generator[Effect, Any, DecodeLeg | None]:
        """Run the prefill leg; None when the client has been answered already."""
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
            self._in_doubt = None
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        yield from self._note_reuse(attachment, prefilled)
        return DecodeLeg(prefilled.params, ids_text)

    def _prefill_cold(
        self, request: ApiRequest, prompt_ids: list[int] | None, ids_text: bytes | None
    ) -> Generator[Effect, Any, DecodeLeg | None]:
        body = legs.prefill_body(request, handles.COLD_PREFILL, ids_text)
        result, prefilled = yield from self._call_cold(request, body)
        if result.status in CLIENT_ERRORS:
            self._conclude(Outcome.REFUSED, Reason.CLIENT_ERROR)
            yield self._refusal(result.status, result.body, result.content_type)
            return None
        if prefilled is None:
            return self._decode_alone(failure(result), ids_text)
        if prompt_ids is not None and prefilled.prompt_ids != prompt_ids:
            return self._decode_alone(Reason.PROMPT_IDS_DIFFER, ids_text)
        self._note_cold(prefilled)
        self._note_local_hit(prefilled)
        if ids_text is None and prefilled.prompt_ids is not None and legs.is_text_only(request):
            ids_text = orjson.dumps(prefilled.prompt_ids)
        return DecodeLeg(prefilled.params, ids_text)

    def _decode_alone(self, reason: Reason, ids_text: bytes | None) -> DecodeLeg:
        """Let D prefill by itself; if it has our plugin, its handle serves the next turn all the same."""
        self._conclude(Outcome.DECODE_ONLY, reason)
        # D's guard would refuse our parameters as P's did; a plain request it lets pass.
        may_ask = self.pool.plugin_everywhere and reason is not Reason.GUARD_REFUSED
        return DecodeLeg(handles.DECODE_ALONE, ids_text) if may_ask else DecodeLeg()
