"""Decide how much of a kept turn a new prompt may read. Everything that is ever attached to a request comes from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc import handle as handles
from extproc.proof import common_prefix
from extproc.receipt import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.handle import Handle
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
    doubt = _doubt_about_blocks(handle, block_size_tokens)
    if doubt is not None:
        return doubt
    proven = min(common_prefix(turn.sequence, prompt_ids), handle.tokens)
    if proven == handle.tokens < len(prompt_ids) and proven >= min_tokens:
        return Attachment(handles.attach_whole(handle), proven, is_whole=True)
    if block_size_tokens is None or not handles.has_countable_blocks(handle):
        return _shortfall(turn, proven, len(prompt_ids), min_tokens)
    blocks = min(proven, len(prompt_ids) - 1) // block_size_tokens
    tokens = blocks * block_size_tokens
    if tokens >= min_tokens:
        return Attachment(handles.attach_cut(handle, blocks, block_size_tokens), tokens, is_whole=False)
    return _shortfall(turn, proven, len(prompt_ids), min_tokens)


def _doubt_about_blocks(handle: Handle, block_size_tokens: int | None) -> Reason | None:
    if not handles.has_countable_blocks(handle):
        return None
    if block_size_tokens is None:
        return Reason.BLOCK_SIZE_UNKNOWN
    return None if handles.blocks_cover_tokens(handle, block_size_tokens) else Reason.BLOCKS_UNEXPLAINED


def _shortfall(turn: StoredTurn, proven: int, prompt_tokens: int, min_tokens: int) -> Reason:
    """Name why so little is usable: the history, its length, or a handle that can only be used whole."""
    if min(proven, prompt_tokens - 1) >= min_tokens and not handles.has_countable_blocks(turn.handle):
        return Reason.CANNOT_CUT
    known = min(turn.sequence.length, turn.handle.tokens)
    return Reason.HISTORY_DIFFERS if proven < known else Reason.TOO_SHORT
