"""Faults on command. A fault names what goes wrong, for which requests, and how many times.

Over HTTP: ``POST /sim/fault`` with one of these as JSON, for instance
``{"kind": "status", "status": 503, "times": 2, "path": "/v1/chat"}``; ``{"kind": "clear"}`` takes all back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What goes wrong."""

    STATUS = "status"
    """Answer with ``status`` at once."""
    RESET = "reset"
    """Reset the connection before any answer."""
    STALL = "stall"
    """Wait ``seconds`` before anything happens (``None``: until the fault is cleared)."""
    TRUNCATE = "truncate"
    """Cut a streamed answer in the middle of its event number ``after_events`` (from 0), ``seconds`` after its first half:
    at once, the reset overtakes what a proxy has not passed on yet."""
    SLOW_READ = "slow_read"
    """Peers wait ``seconds`` for this worker's KV; what they get is what lies there then."""
    FAILED_READ = "failed_read"
    """Peers' reads of this worker's KV fail."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault. Unset conditions match every request; ``times`` unset means until cleared."""

    kind: Kind
    times: int | None = None
    path: str = ""
    """Prefix of the request's path."""
    leg: str | None = None
    """Value of the gateway's ``x-kvloop-leg`` header: ``render``, ``prefill``, ``release``, or empty for none."""
    with_handle: bool | None = None
    """Whether the request lets the worker read KV that another keeps (a decode leg does, too)."""
    status: int = 503
    seconds: float | None = None
    after_events: int = 0

    def matches(self, path: str, leg: str, *, with_handle: bool) -> bool:
        """Tell whether this fault strikes a request."""
        return (
            path.startswith(self.path)
            and (self.leg is None or self.leg == leg)
            and (self.with_handle is None or self.with_handle == with_handle)
        )


class Faults:
    """The faults in force on one worker."""

    def __init__(self) -> None:
        self.active: list[Fault] = []
        self.struck = 0

    def add(self, fault: Fault) -> Fault:
        """Put a fault in force."""
        self.active.append(fault)
        return fault

    def clear(self) -> None:
        """Take all faults back."""
        self.active.clear()

    def take(self, *kinds: Kind, path: str = "", leg: str = "", with_handle: bool = False) -> Fault | None:
        """Return the first fault of these kinds that strikes, and count it as one of its ``times``."""
        for fault in self.active:
            if fault.kind in kinds and fault.matches(path, leg, with_handle=with_handle):
                self.struck += 1
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.active.remove(fault)
                return fault
        return None


def fault_from_json(value: dict[str, Any]) -> Fault:
    """Read a fault from JSON; raises ``ValueError`` for anything it does not know."""
    unknown = value.keys() - {known.name for known in fields(Fault)}
    if unknown or "kind" not in value:
        msg = f"unknown fields {sorted(unknown)}" if unknown else "kind is missing"
        raise ValueError(msg)
    return Fault(**{**value, "kind": Kind(value["kind"])})
