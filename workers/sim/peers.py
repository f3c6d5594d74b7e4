"""How workers reach each other's KV: directly when they share a process, else over HTTP, in place of NIXL."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from workers.sim import kv
from workers.sim.engine import Load, ReadFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence


class KvServer(Protocol):
    """A worker whose KV others read."""

    async def serve_read(self, request_id: str, blocks: Sequence[int], expiry_time: float | None) -> list[kv.Memory]:
        """Answer a read; raises ``ReadFailedError``."""

    def renew(self, request_id: str) -> None:
        """Take a heartbeat."""


class Registry:
    """The workers of one process by engine id, and a way to all others. A restarted worker has a new id."""

    def __init__(self) -> None:
        self._servers: dict[str, KvServer] = {}
        self._session: aiohttp.ClientSession | None = None

    def add(self, engine_id: str, server: KvServer) -> None:
        """Make a worker's KV readable."""
        self._servers[engine_id] = server

    def remove(self, engine_id: str) -> None:
        """Forget a worker that went down."""
        self._servers.pop(engine_id, None)

    async def read(self, load: Load) -> list[kv.Memory]:
        """Fetch the load's remote blocks from wherever that engine is."""
        server = self._servers.get(load.engine_id)
        if server is not None:
            return await server.serve_read(load.request_id, load.remote_blocks, load.expiry_time)
        question = {
            "engine_id": load.engine_id,
            "request_id": load.request_id,
            "blocks": load.remote_blocks,
            "expiry_time": load.expiry_time,
        }
        answer = await self._ask(f"http://{load.host}:{load.port}/sim/read", question)
        return [memory_from_json(memory) for memory in answer["blocks"]]

    async def renew(self, engine_id: str, request_id: str) -> None:
        """Send a heartbeat; workers of other processes get none, their lease has to do."""
        server = self._servers.get(engine_id)
        if server is not None:
            server.renew(request_id)

    async def close(self) -> None:
        """Close connections to other processes."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, url: str, question: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.post(url, json=question) as answer:
                if not answer.ok:
                    raise ReadFailedError(await answer.text())
                return await answer.json()
        except (aiohttp.ClientError, OSError) as error:
            raise ReadFailedError(str(error)) from error


def memory_to_json(memory: kv.Memory) -> list[list[Any]]:
    """Spell one block's content for another process."""
    return [
        [run.begin, run.base, base64.b64encode(run.context).decode(), base64.b64encode(run.tokens).decode()]
        for run in memory
    ]


def memory_from_json(value: list[list[Any]]) -> kv.Memory:
    """Read what ``memory_to_json`` wrote."""
    return tuple(
        kv.Run(begin, base, base64.b64decode(context), base64.b64decode(tokens))
        for begin, base, context, tokens in value
    )
