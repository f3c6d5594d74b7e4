"""What the demo shows while it runs and when it is done: on a terminal with a live line, in a log as plain lines."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from workers.supervision import READY, STARTING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from workers.demo.play import Turn
    from workers.demo.report import TurnRow, Verdict
    from workers.supervision import Progress

LOG_WIDTH: Final = 118
REMINDER_SECONDS: Final = 10.0
"""Without a terminal, an unchanged state is told again this often, so that nobody takes it for a hang."""

ANSWER_CHARACTERS: Final = 240


class Screen:
    """A console that can also show where the parts of the stack stand. Use as a context manager while they start."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(highlight=False)
        self.console = console if console.is_terminal else Console(file=console.file, width=LOG_WIDTH, highlight=False)
        self._status = self.console.status("starting")
        self._told: dict[str, Progress] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.quieten()

    def quieten(self) -> None:
        """Take the live line away."""
        self._status.stop()

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print a line (or several)."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def progress(self, step: Progress) -> None:
        """Show where a component stands: a terminal gets a live line, a log gets changes and reminders."""
        last = self._told.get(step.component)
        changed = last is None or last.state != step.state
        overdue = last is not None and step.seconds - last.seconds >= REMINDER_SECONDS
        if changed and step.state == READY:
            self.say(f"  {step.component}: ready after {step.seconds:.0f} s")
        elif not self.console.is_terminal and (overdue or (changed and step.state != STARTING)):
            self.say(f"  {_standing(step)}")
        if changed or overdue or self.console.is_terminal:
            self._told[step.component] = step
        waiting = [each for each in self._told.values() if each.state != READY]
        self._status.update("   ".join(map(_standing, waiting)))

    def waiting(self, text: str) -> None:
        """Show on a terminal what is being waited for; a log will tell it when it has come."""
        self._status.update(text)

    def played(self, label: str, number: int, turn: Turn) -> None:
        """Tell that a turn was played."""
        self.say(
            f"  reuse {label:<3}  turn {number}  {turn.prompt_tokens:>6,} prompt tokens"
            f"  first token after {turn.ttft_seconds:6.2f} s  {turn.completion_tokens:>3} tokens answered"
        )

    def table(self, rows: Sequence[TurnRow]) -> None:
        """Print one line per turn, both runs side by side."""
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for heading in ("turn", "prompt tokens", "reused tokens", "TTFT off", "TTFT on", "ratio"):
            table.add_column(heading, justify="right")
        table.add_column("text equal")
        for number, row in enumerate(rows, start=1):
            table.add_row(
                str(number),
                f"{row.prompt_tokens:,}",
                f"{row.reused_tokens:,}",
                f"{row.ttft_off_ms / 1000:.2f} s",
                f"{row.ttft_on_ms / 1000:.2f} s",
                f"{row.ttft_ratio:.1f}x",
                _equality(row),
            )
        self.console.print(table)

    def receipts(self, rows: Sequence[TurnRow]) -> None:
        """Print each turn's receipt, as the client saw it in the response header."""
        for number, row in enumerate(rows, start=1):
            self.say(f"  turn {number}  off  {row.receipt_off}")
            self.say(f"          on   {row.receipt_on}")

    def answers(self, rows: Sequence[TurnRow]) -> None:
        """Print the questions and the answers given with reuse on."""
        for number, row in enumerate(rows, start=1):
            self.say(f"  {number}. {row.question}")
            answer = textwrap.shorten(row.answer, ANSWER_CHARACTERS, placeholder=" …")
            self.say(textwrap.indent(textwrap.fill(answer, LOG_WIDTH - 6), "     "))

    def verdict(self, verdict: Verdict, ttft_ratio_goal: float) -> None:
        """Print what the numbers amount to."""
        for line in verdict.lines(ttft_ratio_goal):
            self.say(line, style="bold" if verdict.exit_code == 0 else "bold red")


def _standing(step: Progress) -> str:
    return f"{step.component}: {step.state} …" + (f" {step.seconds:.0f} s" if step.seconds >= 1 else "")


def _equality(row: TurnRow) -> str:
    if row.text_equal:
        return "yes"
    return f"{'excused' if row.acceptable else 'NO'}: {row.reason}"
