"""Find out what may be attached to a prompt: take the conversation's turn, have P render the prompt, prove the one by the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from extproc import legs
from extproc.events import Effect, Leg, LegResult, Take
from extproc.http_exchange import OK, HttpExchange
from extproc.proof import common_prefix
from extproc.receipt import Outcome, Reason
from extproc.reuse import Attachment, prove
from extproc.store import ReturnedTurn, StoredTurn

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.request import ApiRequest

CLIENT_ERRORS: Final = frozenset({400, 401, 403, 404, 413, 422})
"""P's answers that are the client's to mend: passed on unchanged, and no decode leg is sent."""


class AttachingExchange(HttpExchange):
    """An exchange whose request may get a handle."""

    __slots__ = ()

    def _find_reuse(self, request: ApiRequest) -> Generator[Effect, Any, tuple[list[int] | None, Attachment | None]]:
        """Return the prompt's token ids (None: P shall tokenise) and what may be attached to them."""
        if self._key is None or self.receipt.reason is not None:
            if self._ends:
                yield from self._discard_kept()
            return request.token_id_prompt, None
        turn: StoredTurn | ReturnedTurn | Reason | None = yield Take(self._key)
        if isinstance(turn, ReturnedTurn):
            self._returned = turn
            self.receipt.held_tokens = turn.tokens
            self.receipt.reason = Reason.RETURN_LOST  # until P says otherwise
            return request.token_id_prompt, None
        if not isinstance(turn, StoredTurn):
            self.receipt.reason = turn or Reason.NOTHING_KEPT
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
        if not self._render_refused:
            yield from self._release_unsent(verdict)
        # Else the prefill leg will show whether the request is at fault, and then the turn serves a corrected one.
        return prompt_ids, None

    def _discard_kept(self) -> Generator[Effect, Any, None]:
        """Release what is kept for a conversation that ends with a turn that does not look at it."""
        if self._key is not None:
            kept: StoredTurn | ReturnedTurn | Reason | None = yield Take(self._key)
            self._unsent = kept if isinstance(kept, StoredTurn) else None
            yield from self._release_unsent("ended")

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
        self._render_refused = result.status in CLIENT_ERRORS
        return legs.read_rendered(result.body) if result.status == OK else None

    def _note_local_hit(self, prefilled: legs.Prefilled) -> None:
        """Put down in the receipt what P still had of the turn it had read back, as far as the prompt really goes on from it."""
        if self._returned is None or prefilled.prompt_ids is None:
            return
        proven = min(common_prefix(self._returned.sequence, prefilled.prompt_ids), self._returned.tokens)
        hit = min(prefilled.cached_tokens or 0, proven)
        if hit >= self.settings.min_reuse_tokens:
            self._conclude(Outcome.LOCAL, None)
            self.receipt.reused_tokens = hit

    def _call_attached(
        self, request: ApiRequest, body: bytes
    ) -> Generator[Effect, Any, tuple[LegResult, legs.Prefilled | None]]:
        """Send P what carries the handle, which is used up with that; no ``Prefilled``: try again without it."""
        self._in_doubt, self._unsent = self._unsent, None
        result = yield from self._call(
            Leg.PREFILL, request.endpoint.path, body, self.settings.reuse_timeout_seconds, attempt="reuse"
        )
        self.receipt.prefill_ms = result.elapsed_seconds * 1000
        if result.status in CLIENT_ERRORS:
            # P's front refused the request, so its engine read nothing and never will: D need not wait for it.
            self._unsent, self._in_doubt = self._in_doubt, None
            yield from self._release_unsent("refused")
        prefilled = legs.read_prefilled(result.body) if result.status == OK else None
        if prefilled is None:
            self.receipt.reason = failure(result)
            yield from self._release_in_doubt(self.receipt.reason)
        return result, prefilled

    def _call_cold(
        self, request: ApiRequest, body: bytes
    ) -> Generator[Effect, Any, tuple[LegResult, legs.Prefilled | None]]:
        """Send P what carries no handle. A kept turn that waits for it is given back if the request was at fault."""
        result = yield from self._call(
            Leg.PREFILL, request.endpoint.path, body, self.settings.prefill_timeout_seconds, attempt="cold"
        )
        self.receipt.prefill_ms = (self.receipt.prefill_ms or 0.0) + result.elapsed_seconds * 1000
        if result.status in CLIENT_ERRORS:
            yield from self._restore_unsent()
        else:
            yield from self._release_unsent(Reason.RENDER_FAILED)
        return result, legs.read_prefilled(result.body) if result.status == OK else None

    def _note_reuse(self, attachment: Attachment, prefilled: legs.Prefilled) -> Generator[Effect, Any, None]:
        """Put down in the receipt what P made of the handle; D may still hold what P did not read."""
        read = attachment.tokens if prefilled.cached_tokens is None else prefilled.cached_tokens
        # Short of the rest P's own cache had the start of it, and what was left was not worth a read to P.
        if attachment.tokens - read >= self.settings.min_reuse_tokens:
            self._conclude(Outcome.COLD, Reason.READ_FAILED)
            yield from self._release_in_doubt(Reason.READ_FAILED)
        elif attachment.is_whole:
            self._conclude(Outcome.REUSED, None)
        else:
            self._conclude(Outcome.PARTIAL, Reason.HISTORY_DIFFERS)
        self._in_doubt = None
        # P counts what its own prefix cache had, too; no more than what was attached can have come from D.
        self.receipt.reused_tokens = min(read, attachment.tokens)
        self.receipt.cached_tokens = prefilled.cached_tokens
        self.receipt.prompt_tokens = len(prefilled.prompt_ids or ())

    def _note_cold(self, prefilled: legs.Prefilled) -> None:
        """Put down in the receipt that P got no handle; why, stands there already."""
        self._conclude(Outcome.COLD, self.receipt.reason)
        self.receipt.reused_tokens = 0
        self.receipt.cached_tokens = prefilled.cached_tokens
        self.receipt.prompt_tokens = None if prefilled.prompt_ids is None else len(prefilled.prompt_ids)


def failure(result: LegResult) -> Reason:
    """Name what was wrong with P's answer."""
    if result.error == "timeout":
        return Reason.PREFILL_TIMEOUT
    if result.error == "guard_refused":
        return Reason.GUARD_REFUSED
    if result.error:
        return Reason.PREFILL_UNREACHABLE
    return Reason.PREFILL_WITHOUT_KV if result.status == OK else Reason.PREFILL_FAILED
