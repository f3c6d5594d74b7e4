"""When a moment of our own clock is on the store's: handles outlive a process, so their deadlines need a common clock.

Two machines' clocks are never compared with each other, only each with the store server's, by asking it for the time.
Rules that must stay true, whatever the server's clock does meanwhile (steps by NTP, a fail-over to another server):

* A deadline told to the server never lies after the one it stands for.
* A deadline read back never lies after the one that was told, if it is read within ``window_seconds`` of then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_UNKNOWN: Final = (float("inf"), float("-inf"))


@dataclass(slots=True)
class ServerClock:
    """How far the server's clock is ahead of ours, as bounds that hold for the last window; all times in seconds.

    ``window_seconds`` is the longest a deadline lies ahead. Bounds are kept for the running window and the one before it,
    so that a step is remembered for at least one whole window: until then everything told before it has expired.
    """

    window_seconds: float
    max_round_trip_seconds: float
    _began: float = 0.0
    _now: tuple[float, float] = field(default=_UNKNOWN)
    _before: tuple[float, float] = field(default=_UNKNOWN)

    @property
    def is_known(self) -> bool:
        """Whether the server's clock has ever been read well enough."""
        return self._lead[0] <= self._lead[1]

    def note(self, asked_at: float, server_time: float, answered_at: float) -> None:
        """Learn that the server's clock showed ``server_time`` at some moment between asking and the answer.

        A slow answer says too little to be worth the width it would give the bounds; the next one will be faster.
        """
        if answered_at - asked_at > self.max_round_trip_seconds:
            return
        if answered_at - self._began > self.window_seconds:
            is_recent = answered_at - self._began <= 2 * self.window_seconds
            self._before = self._now if is_recent else _UNKNOWN
            self._now, self._began = _UNKNOWN, answered_at
        low, high = self._now
        self._now = min(low, server_time - answered_at), max(high, server_time - asked_at)

    def to_server(self, moment: float) -> float:
        """Return the earliest the server's clock can show at ``moment``."""
        return moment + self._lead[0]

    def from_server(self, server_time: float) -> float:
        """Return the earliest moment at which the server's clock can show ``server_time``."""
        return server_time - self._lead[1]

    @property
    def _lead(self) -> tuple[float, float]:
        return min(self._now[0], self._before[0]), max(self._now[1], self._before[1])
