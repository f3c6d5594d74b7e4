"""The role ``prefill``: attach D's KV to a prefill leg that somebody else's P/D orchestrator sends.

kvloop makes the call to P itself and answers the orchestrator with what P said, so that a P which fails over a handle is
asked once more without it, and the orchestrator never learns. P's answer gets a mark for the decode role (``prompt_mark``).
A request that could not be given a handle in any case goes on to P as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from extproc import handle as handles
from extproc import headers as names
from extproc import legs
from extproc.attaching import CLIENT_ERRORS, AttachingExchange, failure
from extproc.errors import ClientError
from extproc.events import Effect, ForwardRequest, Leg, LegResult, Reply, header
from extproc.http_exchange import OK
from extproc.identity import handle_key
from extproc.prompt_mark import put_mark
from extproc.receipt import Outcome, Reason
from extproc.request import is_true, parse_request
from extproc.turn import Watch, WholeTurn

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.http_exchange import ReceivedRequest
    from extproc.request import ApiRequest

_TIMEOUT_STATUS: Final = 504
_UNREACHABLE_STATUS: Final = 503


class PrefillExchange(AttachingExchange):
    """One prefill leg of an orchestrator."""

    __slots__ = ()

    forwards_to = Leg.PREFILL

    def _serve(self) -> Generator[Effect, Any, None]:
        received = yield from self._receive_request()
        if received is None:
            return
        self.request = request = parse_request(received.endpoint, received.body)
        # One of them is the orchestrator's own.
        self.receipt.forbidden_fields_removed = request.forbidden_fields_removed - (request.transfer_params is not None)
        params = request.transfer_params or handles.COLD_PREFILL
        aside = self._reason_to_stand_aside(request)
        if aside is None:
            self._identify_turn(request, orjson.loads(params))
            if self._key is None and not self._orchestrator_owns_handles:
                aside = self.receipt.reason
        if aside is not None:
            yield from self._stand_aside(received, request, aside)
            return
        yield from self._prefill(request, _without_handle(params))

    @property
    def _orchestrator_owns_handles(self) -> bool:
        return self.settings.handle_owner == "orchestrator"

    # --- requests that get no handle --------------------------------------------------------------------------------

    def _reason_to_stand_aside(self, request: ApiRequest) -> Reason | None:
        named = self.settings.prefill_header
        is_marked = named is not None and header(self.headers, named.lower()) is not None
        if not is_marked and not handles.is_for_prefill(orjson.loads(request.transfer_params or b"null")):
            return Reason.NOT_PREFILL
        if is_true(request.fields.get("stream")):
            return Reason.STREAMED_PREFILL
        return legs.plan_decode_alone(request)

    def _stand_aside(
        self, received: ReceivedRequest, request: ApiRequest, reason: Reason
    ) -> Generator[Effect, Any, None]:
        """Let the request go to P by Envoy alone: as it came, but for a handle nobody has proven."""
        if reason is Reason.NOT_PREFILL:
            # Without the guard's secret: who knows whose transfer parameters these are.
            self._conclude(Outcome.PASSED, reason)
            yield from self._pass_on(ForwardRequest(received.body, had_trailers=received.had_trailers))
            return
        self._conclude(Outcome.COLD, reason)
        body, params = received.body, request.transfer_params
        if self.receipt.forbidden_fields_removed or params != _without_handle(params or handles.COLD_PREFILL):
            body = legs.rewritten_body(request, _without_handle(params or handles.COLD_PREFILL))
        yield from self._pass_on(
            ForwardRequest(body, set_headers=self._secret_headers(), had_trailers=received.had_trailers)
        )

    # --- requests that may get one ----------------------------------------------------------------------------------

    def _identify_turn(self, request: ApiRequest, params: dict[str, Any]) -> None:
        if not self._orchestrator_owns_handles:
            self._identify(request)
            return
        origin = handles.origin(params)
        self.receipt.reason = self._reuse_ruled_out(request)
        if origin is not None:
            self._key = handle_key(*origin)
        elif self.receipt.reason is None:
            self.receipt.reason = Reason.NOTHING_KEPT

    def _prefill(self, request: ApiRequest, cold_params: bytes) -> Generator[Effect, Any, None]:
        prompt_ids, attachment = yield from self._find_reuse(request)
        ids_text = None if prompt_ids is None else orjson.dumps(prompt_ids)
        cache_salt = None
        if attachment is not None:
            body = legs.rewritten_prefill_body(request, attachment.params, ids_text)
            result, prefilled = yield from self._call_attached(request, body)
            if prefilled is not None and prefilled.prompt_ids == prompt_ids:
                yield from self._note_reuse(attachment, prefilled)
                yield self._answer(request, result, prefilled)
                return
            if prefilled is not None:
                # P's KV mixes tokens nobody proved with the handle's, and so does its prefix cache from now on.
                self.pool.prompt_ids_differed = True
                self._in_doubt = None
                self.receipt.reason, ids_text = Reason.PROMPT_IDS_DIFFER, None
                cache_salt = self._own_cache_salt(request)
        body = legs.rewritten_prefill_body(request, cold_params, ids_text, cache_salt=cache_salt)
        yield from self._prefill_cold(request, body)

    def _own_cache_salt(self, request: ApiRequest) -> str:
        """Return a salt nobody else has, so that P finds nothing in its prefix cache for this one request."""
        given = request.fields.get("cache_salt")
        return f"{given if isinstance(given, str) else ''}-{header(self.headers, 'x-request-id')}-{self._now}"

    def _prefill_cold(self, request: ApiRequest, body: bytes) -> Generator[Effect, Any, None]:
        result, prefilled = yield from self._call_cold(request, body)
        if result.status == 0:
            self._conclude(Outcome.REFUSED, failure(result))
            error = _unanswered(result)
            yield self._refusal(error.status, error.body, "application/json")
            return
        if result.status in CLIENT_ERRORS:
            self._conclude(Outcome.REFUSED, Reason.CLIENT_ERROR)
        elif prefilled is None:
            self._conclude(Outcome.COLD if result.status == OK else Outcome.REFUSED, failure(result))
        else:
            self._note_cold(prefilled)
        yield self._answer(request, result, prefilled)

    def _answer(self, request: ApiRequest, result: LegResult, prefilled: legs.Prefilled | None) -> Reply:
        """Answer as P did, less the ids only kvloop asked for, plus the mark of the prompt they are."""
        receipt = self.receipt.header_value()
        prompt_ids = None if prefilled is None else prefilled.prompt_ids

        def marked(params: bytes) -> bytes:
            return params if prompt_ids is None else put_mark(params, prompt_ids, receipt)

        settings = self.settings
        watch = Watch(
            learn_token_ids=False,
            hide_token_ids=not request.wants_token_ids,
            event_max_bytes=settings.event_max_bytes,
            response_max_bytes=settings.response_max_bytes,
            show_params=marked,
        )
        body = WholeTurn(watch).feed(result.body, end=True) or b""
        headers = (("content-type", result.content_type), (names.RECEIPT, receipt))
        self.status = result.status
        return Reply(result.status, body, headers, self.receipt.metadata())


def _without_handle(params: bytes) -> bytes:
    """Return the orchestrator's transfer parameters for a cold leg: its own, unless they point at somebody's KV."""
    fields = orjson.loads(params)
    is_cold = handles.is_for_prefill(fields) and not handles.names_remote_kv(fields)
    return params if is_cold else handles.COLD_PREFILL


def _unanswered(result: LegResult) -> ClientError:
    if result.error == "timeout":
        return ClientError(_TIMEOUT_STATUS, "The prefill worker did not answer in time.", code="timeout")
    if result.error == "guard_refused":
        message = "The prefill worker's guard knows another secret than the gateway."
        return ClientError(_UNREACHABLE_STATUS, message, code="service_unavailable")
    return ClientError(_UNREACHABLE_STATUS, "No prefill worker could be reached.", code="service_unavailable")
