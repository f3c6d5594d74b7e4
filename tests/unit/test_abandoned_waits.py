"""Whoever leaves, fails or comes late while the gateway waits for something: no handle, memory or port is lost with it."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import time
import weakref
from typing import Any

import orjson
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from test_returns import KEY, TURN
from test_stream import Client, Responder, body, gateway
from world import handle_params

from extproc import processes
from extproc.errors import ConfigError
from extproc.events import Call, Leg, LegResult, Restore
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.proof import fingerprint
from extproc.redis_link import connection_maker
from extproc.settings import GatewaySettings
from extproc.store import StoredTurn
from extproc.stream import ProcessStream


def opening() -> bytes:
    values = {":method": "POST", ":path": "/v1/chat/completions", "x-conversation-id": "c"}
    headers = HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in values.items()])
    return ProcessingRequest(request_headers={"headers": headers}).SerializeToString()


def a_turn(request_id: str, deadline: float) -> StoredTurn:
    handle = read_publication(orjson.dumps(handle_params(1000, remote_request_id=request_id))).handle
    return StoredTurn(handle, fingerprint([]), 32, "m", deadline)


def test_a_turn_taken_in_the_moment_its_client_leaves_is_released() -> None:
    async def run() -> None:
        served = gateway()
        taken = asyncio.get_running_loop().create_future()
        released: list[Any] = []
        served.take = lambda _: taken  # type: ignore[method-assign]
        served.release = released.append  # type: ignore[method-assign]
        stream = ProcessStream(served, Responder())  # type: ignore[arg-type]
        stream.message_received(opening())
        stream.message_received(body())
        taken.set_result(TURN)
        stream.reset()
        await asyncio.sleep(0.01)
        assert [release.handle for release in released] == [TURN.handle]

    asyncio.run(run())


def test_a_client_that_leaves_during_a_call_leaves_nothing_to_the_garbage_collector() -> None:
    class Slow(Client):
        async def call(self, _: Any) -> Any:
            await asyncio.sleep(30)

    async def run() -> None:
        gc.collect()
        gc.disable()
        try:
            stream = ProcessStream(gateway(Slow()), Responder())  # type: ignore[arg-type]
            stream.message_received(opening())
            stream.message_received(body())
            await asyncio.sleep(0.01)
            stream.reset()
            left = weakref.ref(stream)
            del stream
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert left() is None
        finally:
            gc.enable()

    asyncio.run(run())


def test_a_turn_past_its_deadline_is_not_read_back_early() -> None:
    async def run() -> None:
        served = gateway()
        now = time.monotonic()
        served.own_store.put(ConversationKey(b"a" * 16), a_turn("first", now + 400))
        late = a_turn("late", now - 1)
        # Behind one that lives longer: expiry, which looks at the oldest, does not reach it.
        served.own_store.put(KEY, late)
        assert served._claim(KEY, late) is False
        assert len(served.own_store) == 1

    asyncio.run(run())


def test_a_turn_given_back_to_a_draining_engine_is_released() -> None:
    async def run() -> None:
        served = gateway()
        released: list[Any] = []
        served.release = released.append  # type: ignore[method-assign]
        served.own_store.put(KEY, TURN)
        taken = served.own_store.take(KEY)
        assert taken is not None
        served.drain_engine(TURN.handle.engine_id)
        restore = Restore(KEY, taken)
        served.kept(restore, served.keep(restore))
        assert [release.reason for release in released] == ["engine_draining"]
        assert len(served.own_store) == 0

    asyncio.run(run())


def test_prefill_workers_that_are_gone_do_not_count_as_there() -> None:
    class Moved(Client):
        async def call(self, call: Any) -> Any:
            return LegResult(200, b"{}", time.monotonic() - 1000, 0.0, upstream=call.path)

    async def run() -> None:
        served = gateway(Moved())
        for number in range(20):
            await served.call(Call(Leg.PREFILL, f"10.0.0.{number}:8100", (), b"", 1.0))
        served._prefilling = 10
        assert served._is_p_busy()

    asyncio.run(run())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_connection_that_cannot_be_accepted_is_not_the_last(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(processes, "_ACCEPT_AGAIN_SECONDS", 0.001)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tries = asyncio.Queue[int]()

        async def accept(_: socket.socket) -> Any:
            tries.put_nowait(1)
            raise OSError(number, "no")

        monkeypatch.setattr(loop, "sock_accept", accept)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = asyncio.create_task(processes.Parent(GatewaySettings(), [])._accept(listener))
            async with asyncio.timeout(10):
                for _ in range(3):
                    await tries.get()
            assert not accepting.done()
            accepting.cancel()

    asyncio.run(run())


def test_no_part_of_a_password_is_told_as_a_port() -> None:
    with pytest.raises(ConfigError, match="KVLOOP_STORE_URL: its port is no number") as raised:
        connection_maker(GatewaySettings(store_url="redis://kvloop:s3cr/et@redis:6379/0"))
    assert "s3cr" not in str(raised.value)
