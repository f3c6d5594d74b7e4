"""Turn two played chats into rows, a verdict, lines for people and JSON for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from workers.demo.compare import Comparison, compare_chats
from workers.demo.receipts import receipt_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.demo.play import Turn

TTFT_RATIO_GOAL: Final = 10.0
"""The last turn's time to first token should fall at least this much. Told, not enforced: machines differ."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn in numbers, both runs side by side. Times in milliseconds; token counts with reuse on.

    ``held_tokens`` is what the decode worker still held from the turn before (its prompt and its answer but
    the last token): the most that can be reused. 0 on the first turn.
    """

    prompt_tokens: int
    reused_tokens: int
    held_tokens: int
    ttft_off_ms: float
    ttft_on_ms: float
    ttft_ratio: float
    text_equal: bool
    reason: str
    acceptable: bool
    largest_logprob_change: float | None
    receipt_off: str
    receipt_on: str
    question: str
    answer: str
    answer_off: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the run showed. ``complaints`` empty means success."""

    complaints: tuple[str, ...]
    texts_equal: bool
    whole_sequence_reused: bool
    last_ttft_ratio: float

    @property
    def exit_code(self) -> int:
        """0 only if every text is equal or excused and every turn from the second on reused something."""
        return 1 if self.complaints else 0

    def lines(self, ttft_ratio_goal: float = TTFT_RATIO_GOAL) -> list[str]:
        """Say it in words; a gain below the goal is mentioned."""
        if self.complaints:
            return ["FAILED", *(f"  {complaint}" for complaint in self.complaints)]
        texts = "all texts equal" if self.texts_equal else "texts equal but for the excused near tie"
        reused = (
            "every turn reused the whole previous sequence"
            if self.whole_sequence_reused
            else "some turns reused only a part of the previous sequence (the receipts say why)"
        )
        ratio = self.last_ttft_ratio
        change = f"{ratio:.1f} times lower" if ratio >= 1 else f"{1 / ratio:.1f} times higher"
        lines = [f"OK: {texts}; {reused}; last turn's time to first token {change}."]
        if ratio < ttft_ratio_goal:
            lines.append(
                f"    (About {ttft_ratio_goal:.0f} times or more is usual for 3,000 tokens; other work on these cores lowers it.)"
            )
        return lines


def rows(off: Sequence[Turn], on: Sequence[Turn]) -> list[TurnRow]:
    """Put the two runs side by side."""
    comparisons = compare_chats(
        [(turn.answer, turn.tokens) for turn in off], [(turn.answer, turn.tokens) for turn in on]
    )
    held = [0, *(turn.held_tokens for turn in on)]
    return [
        _row(mine, theirs, comparison, held_tokens)
        for mine, theirs, comparison, held_tokens in zip(off, on, comparisons, held, strict=False)
    ]


def _row(off: Turn, on: Turn, comparison: Comparison, held_tokens: int) -> TurnRow:
    cold = receipt_value(on.receipt, "reason") or ""
    return TurnRow(
        prompt_tokens=on.prompt_tokens,
        reused_tokens=on.reused_tokens,
        held_tokens=held_tokens,
        ttft_off_ms=round(off.ttft_seconds * 1000, 1),
        ttft_on_ms=round(on.ttft_seconds * 1000, 1),
        ttft_ratio=round(off.ttft_seconds / on.ttft_seconds, 2),
        text_equal=comparison.text_equal,
        reason="; ".join(part for part in (cold, comparison.reason) if part),
        acceptable=comparison.acceptable,
        largest_logprob_change=comparison.largest_logprob_change,
        receipt_off=off.receipt,
        receipt_on=on.receipt,
        question=on.question,
        answer=on.answer,
        answer_off=off.answer,
    )


def judge(table: Sequence[TurnRow]) -> Verdict:
    """Say whether the loop worked."""
    complaints = [
        f"turn {number}: wrong answer with reuse on: {row.reason}"
        for number, row in enumerate(table, start=1)
        if not row.acceptable
    ]
    complaints += [
        f"turn {number}: nothing was reused ({row.receipt_on or 'no receipt'})"
        for number, row in enumerate(table, start=1)
        if number > 1 and row.reused_tokens == 0
    ]
    complaints += [
        f"turn {number} of the run with reuse off reused something: {row.receipt_off}"
        for number, row in enumerate(table, start=1)
        if int(receipt_value(row.receipt_off, "reused") or 0) > 0
    ]
    last = table[-1]
    return Verdict(
        complaints=tuple(complaints),
        texts_equal=all(row.text_equal for row in table),
        whole_sequence_reused=all(row.reused_tokens == row.held_tokens for row in table),
        last_ttft_ratio=last.ttft_ratio,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Everything the demo found out. ``run`` says how it was played, ``machine`` where."""

    rows: list[TurnRow]
    verdict: Verdict
    run: dict[str, Any]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Build the ``--json`` document. ``turns`` holds the numbers of the printed table."""
        return {
            "turns": [asdict(row) for row in self.rows],
            "passed": not self.verdict.complaints,
            "complaints": list(self.verdict.complaints),
            "whole_sequence_reused": self.verdict.whole_sequence_reused,
            "last_ttft_ratio": self.verdict.last_ttft_ratio,
            "run": self.run,
            "machine": self.machine,
        }
