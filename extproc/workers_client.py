"""Our own HTTP calls to workers: render, prefill and release legs through Envoy, and D's /metrics for its block size."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import aiohttp
import structlog

from extproc import headers as names
from extproc import legs
from extproc.events import Call, Leg, LegResult
from extproc.http_client import Origin
from extproc.worker_metrics import EngineLoad, read_engine_load

if TYPE_CHECKING:
    import ssl

    from extproc.events import Headers, Release


_FORBIDDEN: Final = 403
_GUARD_CODE: Final = names.GUARD_CODE.encode()

log = structlog.get_logger()


class WorkersClient:
    """One connection pool for all exchanges of a process. Use as an async context manager."""

    def __init__(
        self,
        prefill_url: str,
        *,
        secret: str | None = None,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._prefill = Origin(prefill_url, tls=tls)
        self._secret: Headers = () if secret is None else ((names.SECRET, secret),)
        self._warned_of_secret = False
        self._own_key: Headers = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True),
            trust_env=False,
            # What one worker sets is no other's business.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._prefill.close()
        await self._session.close()

    async def call(self, call: Call) -> LegResult:
        """Perform a leg. Failures come back as results; cancelling the task drops the connection, which aborts P."""
        started = time.monotonic()
        try:
            # Envoy balances and limits; a limit of our own would only hide a queue in front of it.
            async with asyncio.timeout(call.timeout_seconds):
                response = await self._prefill.post(call.path, call.headers + self._secret, call.body)
        except TimeoutError:
            return _failed("timeout", started)
        except OSError:
            return _failed("unreachable", started)
        if response.status == _FORBIDDEN and _GUARD_CODE in response.body:
            self._warn_of_secret()
            return _failed("guard_refused", started)
        now = time.monotonic()
        return LegResult(
            status=response.status,
            body=response.body,
            at=now,
            elapsed_seconds=now - started,
            content_type=response.headers.get("content-type", "application/json"),
            upstream=response.headers.get(names.UPSTREAM, ""),
        )

    def _warn_of_secret(self) -> None:
        """Log, once, that the workers' guard and we do not know the same secret."""
        if not self._warned_of_secret:
            self._warned_of_secret = True
            log.warning(
                "guard_refused",
                reason="the guard on the prefill workers knows another secret" if self._secret else "we have no secret",
                effect="decode workers serve alone, without reuse",
                fix="set KVLOOP_WORKER_SECRET to the workers' secret, here and on every worker",
            )

    async def call_own(self, call: Call) -> LegResult:
        """Perform a leg that no client stands behind, and so no client's key."""
        return await self.call(replace(call, headers=call.headers + self._own_key))

    async def release(self, release: Release, timeout_seconds: float) -> bool:
        """Have D free a handle's blocks; False if that failed, in which case D's own TTL will do it."""
        headers: Headers = (
            ("content-type", "application/json"),
            (names.LEG, Leg.RELEASE),
        )
        body = legs.release_body(release.handle, release.model)
        result = await self.call_own(Call(Leg.RELEASE, legs.RELEASE_PATH, headers, body, timeout_seconds))
        return result.status == 200  # noqa: PLR2004 - HTTP OK

    async def engine_load(self, address: str) -> EngineLoad | None:
        """Ask the worker at ``ip:port`` for its KV block size, capacity and usage; None if it does not answer."""
        try:
            async with asyncio.timeout(5), self._session.get(f"http://{address}/metrics") as response:
                return read_engine_load(await response.text()) if response.ok else None
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
            return None


def _failed(error: str, started: float) -> LegResult:
    now = time.monotonic()
    return LegResult(status=0, body=b"", at=now, elapsed_seconds=now - started, error=error)
