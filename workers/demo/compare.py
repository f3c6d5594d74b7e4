"""Compare what the model answered with reuse off and on. Pure: turns in, verdicts out.

Reading KV back must not change the answer. Two runs may still part where two tokens are so nearly tied that
the order of floating-point sums decides (reuse changes how the prompt is cut into pieces). That excuse is
granted only when both tokens' log-probabilities are the same in both runs to within ``TIE_TOLERANCE``;
anything else is a wrong answer.

Each run continues from its own answers. So once an answer differs, the two chats are different chats: later
turns are not compared, and say so, but they keep what they measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIE_TOLERANCE: Final = 1e-2
"""In natural-log units."""


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One generated token; ``candidates`` are the likeliest tokens, this one included, by log-probability."""

    token: str
    logprob: float
    candidates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Verdict on one turn.

    ``text_equal`` is plain string equality. ``acceptable`` is that or an excused near tie, now or in an
    earlier turn. ``reason`` says in words why the texts differ or are not comparable.
    ``largest_logprob_change`` is the largest difference between the runs' log-probabilities over the tokens
    both chose, in natural-log units; ``None`` without any.
    """

    text_equal: bool
    acceptable: bool
    reason: str
    largest_logprob_change: float | None


def compare_answers(off_text: str, off: Sequence[ChosenToken], on_text: str, on: Sequence[ChosenToken]) -> Comparison:
    """Compare two answers to the same prompt."""
    shared = _shared_tokens(off, on)
    change = max(
        (abs(mine.logprob - theirs.logprob) for mine, theirs in zip(off[:shared], on[:shared], strict=True)),
        default=None,
    )
    if off_text == on_text:
        return Comparison(text_equal=True, acceptable=True, reason="", largest_logprob_change=change)
    if shared == len(off) or shared == len(on):
        reason = f"one answer ends after token {shared}, where the other goes on"
        return Comparison(text_equal=False, acceptable=False, reason=reason, largest_logprob_change=change)
    gap = _disagreement(off[shared], on[shared])
    if gap is None:
        reason = f"token {shared + 1} differs and is not among the other run's likeliest"
    elif gap <= TIE_TOLERANCE:
        reason = f"token {shared + 1} is a near tie: log-probabilities agree to {gap:.4f} between the runs"
    else:
        reason = f"token {shared + 1} differs by {gap:.4f} in log-probability between the runs"
    acceptable = gap is not None and gap <= TIE_TOLERANCE
    return Comparison(text_equal=False, acceptable=acceptable, reason=reason, largest_logprob_change=change)


def compare_chats(
    off: Sequence[tuple[str, Sequence[ChosenToken]]], on: Sequence[tuple[str, Sequence[ChosenToken]]]
) -> list[Comparison]:
    """Compare two chats turn by turn; each turn is its text and its tokens."""
    comparisons: list[Comparison] = []
    parted: int | None = None
    for turn, (mine, theirs) in enumerate(zip(off, on, strict=True), start=1):
        if parted is not None:
            excused = comparisons[parted - 1].acceptable
            reason = f"not comparable: the two chats have different histories since turn {parted}"
            comparisons.append(Comparison(mine[0] == theirs[0], excused, reason, None))
            continue
        comparisons.append(compare_answers(*mine, *theirs))
        if not comparisons[-1].text_equal:
            parted = turn
    return comparisons


def _shared_tokens(off: Sequence[ChosenToken], on: Sequence[ChosenToken]) -> int:
    for index, (mine, theirs) in enumerate(zip(off, on, strict=False)):
        if mine.token != theirs.token:
            return index
    return min(len(off), len(on))


def _disagreement(off: ChosenToken, on: ChosenToken) -> float | None:
    """Return how far the runs are apart on the two tokens they chose; ``None`` when a run does not tell.

    Each run chose its own likeliest token, so if both agree on both log-probabilities, the two tokens are
    tied to within twice that.
    """
    if on.token not in off.candidates or off.token not in on.candidates:
        return None
    return max(
        abs(off.logprob - on.candidates[off.token]),
        abs(on.logprob - off.candidates[on.token]),
    )
