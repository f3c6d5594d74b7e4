"""Draw the demo's chart: time to first token per turn, reuse off beside reuse on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from workers.demo.report import TurnRow

OFF_COLOUR: Final = "#9aa5b1"
ON_COLOUR: Final = "#0b7a75"
TEXT_COLOUR: Final = "#1f2933"
QUIET_COLOUR: Final = "#616e7c"
BAR_WIDTH: Final = 0.38
WORTH_SAYING: Final = 1.5


def draw(rows: list[TurnRow], *, title: str, footnote: str, path: Path) -> None:
    """Write a PNG. Bars start at zero, so their lengths compare honestly; each carries its number."""
    figure = Figure(figsize=(9, 5.2), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, 0.21, 0.905, 0.63))
    positions = range(len(rows))
    off = [row.ttft_off_ms / 1000 for row in rows]
    on = [row.ttft_on_ms / 1000 for row in rows]
    axes.bar(
        [x - BAR_WIDTH / 2 for x in positions],
        off,
        BAR_WIDTH,
        color=OFF_COLOUR,
        label="reuse off (P → D only)",
    )
    axes.bar(
        [x + BAR_WIDTH / 2 for x in positions],
        on,
        BAR_WIDTH,
        color=ON_COLOUR,
        label="reuse on (kvloop: D → P too)",
    )
    for x, row in enumerate(rows):
        _label(axes, x - BAR_WIDTH / 2, row.ttft_off_ms, "", QUIET_COLOUR)
        faster = f"{row.ttft_ratio:.0f}x faster\n" if row.reused_tokens and row.ttft_ratio >= WORTH_SAYING else ""
        _label(axes, x + BAR_WIDTH / 2, row.ttft_on_ms, faster, ON_COLOUR)
    axes.set_xticks(list(positions), [_tick(number, row) for number, row in enumerate(rows, start=1)])
    axes.set_ylabel("time to first token (s)", color=TEXT_COLOUR)
    axes.set_ylim(0, max([*off, *on], default=1) * 1.18)
    axes.tick_params(colors=TEXT_COLOUR, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET_COLOUR)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.suptitle(title, x=0.075, y=0.97, ha="left", fontsize=14, fontweight="bold", color=TEXT_COLOUR)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.008, 0.985), ncols=2, frameon=False, labelcolor=TEXT_COLOUR)
    figure.text(0.075, 0.025, footnote, fontsize=8, color=QUIET_COLOUR, va="bottom", linespacing=1.4)
    figure.savefig(path)


def _tick(number: int, row: TurnRow) -> str:
    return f"turn {number}\n{row.reused_tokens:,} of {row.prompt_tokens:,}\ntokens reused"


def _label(axes: object, x: float, milliseconds: float, prefix: str, colour: str) -> None:
    axes.annotate(  # type: ignore[attr-defined]
        f"{prefix}{milliseconds / 1000:.2f} s",
        (x, milliseconds / 1000),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8.5,
        fontweight="bold" if prefix else "normal",
        color=colour,
    )
