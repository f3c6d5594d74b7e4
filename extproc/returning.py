"""Plan how P can read a finished turn back right away, for ``returns`` to carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc import legs
from extproc.capturing import CapturingExchange
from extproc.events import Returning
from extproc.reuse import Attachment, prove

if TYPE_CHECKING:
    from extproc.request import ApiRequest
    from extproc.store import StoredTurn
    from extproc.turn import Learned


class ReturningExchange(CapturingExchange):
    """An exchange whose turn may be read back early: P is ours to choose."""

    __slots__ = ()

    def _wants_token_ids(self) -> bool:
        """As ever; but a digest only proves, and a return has to spell the tokens."""
        if self._key is None or self._ends or not self.settings.reuse:
            return False
        return self.settings.return_mode != "lazy" or super()._wants_token_ids()

    def _return_plan(self, request: ApiRequest, turn: StoredTurn, learned: Learned) -> Returning | None:
        """Return the leg that reads the turn back, by the same proof as a next turn's; None if there is none."""
        settings = self.settings
        if settings.return_mode == "lazy" or learned.prompt_ids is None:
            return None
        ids = learned.prompt_ids + learned.generated_ids
        block_size = (
            turn.block_size_tokens
            or self.pool.block_size_tokens(turn.handle.engine_id)
            or settings.decode_block_size_tokens
        )
        try:
            attachment = prove(turn, ids, block_size_tokens=block_size, min_tokens=settings.min_reuse_tokens)
        except (OverflowError, TypeError):
            return None  # D answered with what are no token ids
        if not isinstance(attachment, Attachment):
            return None
        salt = request.fields.get("cache_salt")
        body = legs.return_body(
            ids,
            attachment.params,
            model=request.model,
            cache_salt=salt if isinstance(salt, str) else "",
            priority=settings.return_priority,
        )
        return Returning(body, attachment.tokens)
