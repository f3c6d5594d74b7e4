"""Turn requests away before they cost anything, once the process has as many as it can serve in time.

A queue in front of busy workers only turns into timeouts: for the client, who waits for an error, and for the others, who
wait behind requests nobody waits for any more. So what exceeds a bound is refused at its headers, before its body is read.

``Load`` is what the process is busy with; each exchange has a ``Share`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.errors import Overloaded

if TYPE_CHECKING:
    from extproc.settings import GatewaySettings


@dataclass(slots=True)
class Load:
    """Requests being served, those of them not sent to D yet, and the bytes of their bodies. Mutable; one event loop's."""

    requests: int = 0
    preparing: int = 0
    body_bytes: int = 0


@dataclass(slots=True)
class Share:
    """One request's part of the load. Every method may be called at any time; ``leave`` gives back whatever was taken."""

    load: Load
    _is_in: bool = False
    _is_preparing: bool = False
    _body_bytes: int = 0

    def enter(self, settings: GatewaySettings) -> None:
        """Take a place; raises ``Overloaded`` if there is none."""
        if self.load.requests >= settings.max_requests:
            raise Overloaded(f"All {settings.max_requests} places for requests are taken.")
        if self.load.preparing >= settings.max_preparing_requests:
            raise Overloaded(f"{settings.max_preparing_requests} requests are waiting for their prefill already.")
        self.load.requests += 1
        self.load.preparing += 1
        self._is_in = self._is_preparing = True

    def hold(self, count: int, settings: GatewaySettings) -> None:
        """Note that so many more bytes of the body are here; raises ``Overloaded`` if that is too much for all together."""
        if self.load.body_bytes + count > settings.request_max_total_bytes:
            raise Overloaded("The requests being served hold as much memory as they may.")
        self.load.body_bytes += count
        self._body_bytes += count

    def prepared(self) -> None:
        """Note that the request was sent to D."""
        self.load.preparing -= self._is_preparing
        self._is_preparing = False

    def leave(self) -> None:
        """Give everything back."""
        self.prepared()
        self.load.requests -= self._is_in
        self._is_in = False
        self.load.body_bytes -= self._body_bytes
        self._body_bytes = 0
