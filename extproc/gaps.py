"""How likely a conversation is to come back, learnt from how long others of its kind took.

Time since a turn's end is cut into intervals, each twice as long as the one before. For each kind of conversation and each
interval it is counted how many were still waiting at its start (*at risk*) and how many came back within it. Their quotient
is the chance of coming back in that interval for one that has waited so long; the chance of coming back at all is what is
left when all the coming intervals fail to bring it. Conversations that are cut short (evicted, or still waiting) count for
the intervals they have lived through, so nothing has to be known of their end. (In statistics: a life table.)

A kind with few observations is drawn towards all kinds taken together, and these towards ``PRIOR_HAZARD``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

BOUNDS_SECONDS: Final = tuple(2.0**exponent for exponent in range(11))
"""Ends of the intervals: 1, 2, 4 ... 1024 s; the last interval has none."""

INTERVALS: Final = len(BOUNDS_SECONDS) + 1
PRIOR_HAZARD: Final = 0.1
"""Chance per interval where nothing is known: about two in three come back in the end."""

PRIOR_WEIGHT: Final = 10.0
"""Observations that the prior, or for a kind all others, are worth."""

MEMORY: Final = 2000.0
"""Beyond so many turns of a kind all its counts are halved: what was learnt last week must not outweigh today."""

MAX_KINDS: Final = 1000
"""Kinds are per tenant; beyond this many, the one unseen for longest is forgotten."""


def interval_of(waited_seconds: float) -> int:
    """Return the number of the interval a time lies in."""
    return sum(waited_seconds >= bound for bound in BOUNDS_SECONDS)


@dataclass(slots=True)
class _Counts:
    at_risk: list[float] = field(default_factory=lambda: [0.0] * INTERVALS)
    returned: list[float] = field(default_factory=lambda: [0.0] * INTERVALS)

    def enter(self, interval: int) -> None:
        self.at_risk[interval] += 1
        if self.at_risk[0] > MEMORY:
            self.at_risk = [count / 2 for count in self.at_risk]
            self.returned = [count / 2 for count in self.returned]

    def hazard(self, interval: int, prior: float) -> float:
        return (self.returned[interval] + PRIOR_WEIGHT * prior) / (self.at_risk[interval] + PRIOR_WEIGHT)


class GapStatistics:
    """Counts by kind (any text). Time is the caller's."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._kinds: OrderedDict[str, _Counts] = OrderedDict()

    def entered(self, kind: str, interval: int) -> None:
        """Note that a conversation is waiting at the start of an interval (0: its turn has just ended)."""
        counts = self._kinds.pop(kind, None) or _Counts()
        self._kinds[kind] = counts
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        for each in (self._all, counts):
            each.enter(interval)

    def returned(self, kind: str, interval: int) -> None:
        """Note that one that had entered this interval came back in it."""
        self._all.returned[interval] += 1
        if kind in self._kinds:
            self._kinds[kind].returned[interval] += 1

    def chances(self, kind: str, until_seconds: float) -> list[float]:
        """Return, by interval already reached, the chance to come back before ``until_seconds`` after the turn's end."""
        last = interval_of(until_seconds)
        own = self._kinds.get(kind)
        chances = [0.0] * INTERVALS
        stays_away = 1.0
        for interval in range(last, -1, -1):
            hazard = self._all.hazard(interval, PRIOR_HAZARD)
            if own is not None:
                hazard = own.hazard(interval, hazard)
            stays_away *= 1.0 - min(hazard, 1.0)
            chances[interval] = 1.0 - stays_away
        return chances
