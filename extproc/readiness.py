"""Whether this replica can serve: Envoy's prefill listener, without which there are no legs, can be reached.

``/readyz`` follows it as it comes and goes. gRPC health, by which Envoy sends requests here, waits for the first time only:
a replica that loses the listener later still serves, if only by D alone, which is better than an error.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_TIMEOUT_SECONDS: Final = 2.0
_FIRST_INTERVAL_SECONDS: Final = 0.1
_INTERVAL_SECONDS: Final = 1.0
_FAILURES_ALLOWED: Final = 3
_PATIENCE_SECONDS: Final = 5.0

log = structlog.get_logger()


class Readiness:
    """Knows whether the listener at ``prefill_url`` accepts connections, and whether this process is draining."""

    def __init__(self, prefill_url: str) -> None:
        address = urlsplit(prefill_url)
        self._host = address.hostname or ""
        self._port = address.port or (443 if address.scheme == "https" else 80)
        self._is_reachable = False
        self.is_draining = False

    def obstacle(self) -> str | None:
        """Name what keeps this replica from serving, None if nothing does."""
        if self.is_draining:
            return "draining"
        if not self._is_reachable:
            return f"Envoy's prefill listener {self._host}:{self._port} does not answer (KVLOOP_PREFILL_URL)"
        return None

    async def watch(self, first_reached: Callable[[], None]) -> None:
        """Probe for ever; ``first_reached`` is called once, when the listener first answers."""
        failures = 0
        was_reached = was_missed = False
        started_at = time.monotonic()
        while True:
            if await self._probe():
                failures = 0
                if not self._is_reachable:
                    self._is_reachable = True
                    log.info("prefill_listener_reached", host=self._host, port=self._port)
                if not was_reached:
                    was_reached = True
                    first_reached()
            else:
                failures += 1
                if self._is_reachable and failures >= _FAILURES_ALLOWED:
                    self._is_reachable = False
                    log.warning("prefill_listener_lost", host=self._host, port=self._port)
                elif not (was_reached or was_missed) and time.monotonic() - started_at >= _PATIENCE_SECONDS:
                    was_missed = True
                    fix = "start Envoy, or point KVLOOP_PREFILL_URL at its prefill listener"
                    log.warning("prefill_listener_not_reached", host=self._host, port=self._port, fix=fix)
            await asyncio.sleep(_INTERVAL_SECONDS if was_reached else _FIRST_INTERVAL_SECONDS)

    async def _probe(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (TimeoutError, OSError):
            return False
        # Aborted, so that no side is left with a connection in TIME_WAIT every second.
        writer.transport.abort()
        return True
