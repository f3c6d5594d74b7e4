"""Our own HTTP calls to workers: render, prefill and release legs through Envoy, and D's /metrics for its block size."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

import aiohttp

from extproc import headers as names
from extproc import legs
from extproc.events import Call, Leg, LegResult
from extproc.worker_metrics import EngineLoad, read_engine_load

if TYPE_CHECKING:
    import ssl

    from extproc.events import Headers, Release


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
        self._prefill_url = prefill_url
        self._secret: Headers = () if secret is None else ((names.SECRET, secret),)
        self._own_key: Headers = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def __aenter__(self) -> Self:
        # Envoy balances and limits; a limit of our own would only hide a queue in front of it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            trust_env=False,
            # The session serves every client: a cookie a worker (or a proxy before it) sets for one is not another's.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, call: Call) -> LegResult:
        """Perform a leg. Failures come back as results; cancelling the task drops the connection, which aborts P."""
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(call.timeout_seconds),
                self._session.post(
                    self._prefill_url + call.path,
                    data=call.body,
                    headers=list(call.headers + self._secret),
                    timeout=aiohttp.ClientTimeout(total=None),
                    # Elsewhere neither the secret nor the prompt has any business.
                    allow_redirects=False,
                ) as response,
            ):
                body = await response.read()
        except TimeoutError:
            return _failed("timeout", started)
        except (aiohttp.ClientError, OSError):
            return _failed("unreachable", started)
        now = time.monotonic()
        return LegResult(
            status=response.status,
            body=body,
            at=now,
            elapsed_seconds=now - started,
            content_type=response.headers.get("content-type", "application/json"),
            upstream=response.headers.get(names.UPSTREAM, ""),
        )

    async def release(self, release: Release, timeout_seconds: float) -> bool:
        """Have D free a handle's blocks; False if that failed, in which case D's own TTL will do it."""
        headers: Headers = (
            ("content-type", "application/json"),
            (names.LEG, Leg.RELEASE),
            # No client stands behind a release, so no client's key does.
            *self._own_key,
        )
        body = legs.release_body(release.handle, release.model)
        result = await self.call(Call(Leg.RELEASE, legs.RELEASE_PATH, headers, body, timeout_seconds))
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
