"""When P reads a kept turn back: at the next turn (lazy), right after this one (eager), or as it pays (adaptive)."""

from __future__ import annotations

from typing import Final, Literal

ReturnMode = Literal["lazy", "eager", "adaptive"]

LIKELY: Final = 0.5
"""Reading early takes the read off the next turn's path, at the price of a read for nothing if there is none. Both weigh the
same, whatever the length: it pays if the next turn is more likely than not."""

LIKELY_UNDER_PRESSURE: Final = 0.2
"""While D needs its memory, the choice is between reading early and giving the turn up."""


def returns_early(mode: ReturnMode, *, chance: float, d_under_pressure: bool) -> bool:
    """Tell whether to read a turn back now. ``chance``: of the conversation's coming back, 0 to 1."""
    if mode == "adaptive":
        return chance >= (LIKELY_UNDER_PRESSURE if d_under_pressure else LIKELY)
    return mode == "eager"
