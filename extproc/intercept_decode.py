"""The role ``decode``: keep the handle that D publishes at the end of a decode leg somebody else's orchestrator sends.

The request goes on as it came, but for the mark of the prefill role, which is taken out, and token ids, which are asked
for where D has no digest of its own. Of the response, only what kvloop asked for is hidden, and the handle; unless the
orchestrator carries handles from turn to turn itself. Then it gets the handle, and kvloop keeps what proves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from extproc import handle as handles
from extproc import legs
from extproc.capturing import CapturingExchange
from extproc.events import Effect, ForwardRequest
from extproc.identity import handle_key
from extproc.prompt_mark import PromptMark, take_mark
from extproc.receipt import Outcome, Reason
from extproc.request import parse_request

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc import proof
    from extproc.handle import Handle, Publication
    from extproc.identity import ConversationKey
    from extproc.request import ApiRequest
    from extproc.turn import Learned


class DecodeExchange(CapturingExchange):
    """One decode leg of an orchestrator."""

    __slots__ = ("_mark", "_reads_prefilled_kv")

    _mark: PromptMark | None
    _reads_prefilled_kv: bool

    def _serve(self) -> Generator[Effect, Any, None]:
        received = yield from self._receive_request()
        if received is None:
            return
        self.request = request = parse_request(received.endpoint, received.body)
        # One of them is the orchestrator's own.
        self.receipt.forbidden_fields_removed = request.forbidden_fields_removed - (request.transfer_params is not None)
        if request.transfer_params is None:
            # Without transfer parameters D publishes no handle.
            yield from self._pass_on(ForwardRequest(request.raw, had_trailers=received.had_trailers))
            return
        params, self._mark = take_mark(request.transfer_params)
        self._reads_prefilled_kv = handles.is_for_decode(orjson.loads(params))
        self._identify(request)
        self.receipt.outcome, self.receipt.reason = Outcome.WATCHED, None
        asked = self._wants_token_ids() and self._reuse_ruled_out(request) is None
        self._forwarded_at = self._now
        self._prepared()
        yield ForwardRequest(
            legs.decode_body(request, params, None, ask_token_ids=asked),
            set_headers=self._decode_headers(with_params=True),
            remove_headers=self._removed_headers(with_params=True),
            had_trailers=received.had_trailers,
        )
        yield from self._respond(request, watches=True, asked=asked)

    # --- what the orchestrator gets to see --------------------------------------------------------------------------

    @property
    def _orchestrator_owns_handles(self) -> bool:
        return self.settings.handle_owner == "orchestrator"

    def _shown_params(self, params: bytes) -> bytes | None:
        """Hide a handle; show what belongs to another protocol, and a handle to whoever carries it."""
        if not handles.is_for_prefill(orjson.loads(params)):
            return params
        return handles.without_digest(params) if self._orchestrator_owns_handles else None

    def _receipt_header(self) -> str:
        """Show what the prefill role did for this turn: to the orchestrator's client it is one request."""
        return self.receipt.header_value() if self._mark is None else self._mark.receipt

    # --- what is kept -----------------------------------------------------------------------------------------------

    @property
    def _is_followed(self) -> bool:
        return self._orchestrator_owns_handles or self._key is not None

    @property
    def _is_first_turn(self) -> bool:
        """Tell by the prefill role's receipt: what was kept has been taken there."""
        return self._mark is None or "held=" not in self._mark.receipt

    def _key_of(self, handle: Handle) -> ConversationKey | None:
        if not self._orchestrator_owns_handles:
            return self._key
        origin = handles.origin(orjson.loads(handle.raw))
        return None if origin is None else handle_key(*origin)

    def _reuse_ruled_out(self, request: ApiRequest) -> Reason | None:
        return super()._reuse_ruled_out(request) or legs.plan_decode_alone(request)

    def _doubt(self, publication: Publication, sequence: proof.Sequence, learned: Learned) -> str | None:
        if not self._reads_prefilled_kv:
            return None
        if self._mark is None:
            # D's KV began as that of a P whose tokens nobody told us.
            return "prompt_unmarked"
        is_the_same = self._mark.agrees(sequence, learned.prompt_ids, publication.prompt_end)
        return None if is_the_same else "prompt_ids_differ"
