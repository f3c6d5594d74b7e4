"""Decide how much of a kept turn a new prompt may read. Everything that is ever attached to a request comes from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc import handle as handles
from extproc.proof import common_prefix
from extproc.receipt import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.store import StoredTurn


@dataclass(frozen=True, slots=True)
class Attachment:
    """Transfer parameters (JSON text) that let P read ``tokens`` leading tokens, all of them proven equal."""

    params: bytes
    tokens: int
    is_whole: bool


def prove(
    turn: StoredTurn, prompt_ids: Sequence[int], *, block_size_tokens: int | None, min_tokens: int
) -> Attachment | Reason:
    """Return what to attach for this prompt, or why nothing may be attached.

    The prompt must be longer than what is attached: P trims D's block list from the end to fit a shorter prompt, and
    would read the wrong blocks.
    """
    handle = turn.handle
    proven = min(common_prefix(turn.sequence, prompt_ids), handle.tokens)
    if proven == handle.tokens < len(prompt_ids):
        if proven < min_tokens:
            return Reason.TOO_SHORT
        return Attachment(handles.attach_whole(handle), proven, is_whole=True)
    usable = min(proven, len(prompt_ids) - 1)
    shortfall = Reason.HISTORY_DIFFERS if proven < min(turn.sequence.length, handle.tokens) else Reason.TOO_SHORT
    if usable < min_tokens:
        return shortfall
    blocks = handles.whole_blocks(handle, usable, block_size_tokens)
    if blocks == 0:
        return Reason.CANNOT_CUT
    assert block_size_tokens is not None  # noqa: S101 - or there would be no blocks
    tokens = blocks * block_size_tokens
    if tokens < min_tokens:
        return shortfall
    return Attachment(handles.attach_cut(handle, blocks, block_size_tokens), tokens, is_whole=False)
