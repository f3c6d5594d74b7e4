"""One ext_proc stream whose surroundings fail: it still ends, once, and is counted out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.gateway import Gateway
from extproc.grpc_server import Status
from extproc.settings import GatewaySettings
from extproc.stream import ProcessStream

BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})


class Client:
    """Calls P in the way a test wants it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def call(self, _: Any) -> Any:
        await asyncio.sleep(0)
        raise self.error or AssertionError("nobody should call")


class Responder:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended: list[int] = []
        self.over = asyncio.Event()

    def metadata(self, _: str) -> str:
        return ""

    def send(self, message: bytes) -> bool:
        self.sent.append(message)
        return True

    def finish(self, status: int, _: str = "") -> None:
        self.ended.append(status)
        self.over.set()

    def consumed(self, _: bytes) -> None:
        pass


def gateway(client: Client | None = None) -> Gateway:
    return Gateway(GatewaySettings(), client or Client())  # type: ignore[arg-type]


def opening(path: str = "/v1/chat/completions") -> bytes:
    values = {":method": "POST", ":path": path}
    headers = HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()])
    return ProcessingRequest(request_headers={"headers": headers}).SerializeToString()


def body(data: bytes = BODY) -> bytes:
    return ProcessingRequest(request_body={"body": data, "end_of_stream": True}).SerializeToString()


def live(served: Gateway) -> float | None:
    return served.metrics.registry.get_sample_value("kvloop_live_requests")


async def settle(responder: Responder) -> None:
    async with asyncio.timeout(30):
        await responder.over.wait()


@pytest.mark.parametrize("error", [ValueError("a header nobody can send"), RuntimeError("session closed"), KeyError(1)])
def test_a_call_that_fails_in_an_unforeseen_way_ends_the_stream(error: Exception) -> None:
    """Nobody else would: Envoy would hold the client's request until its idle timeout."""

    async def run() -> None:
        served, responder = gateway(Client(error)), Responder()
        stream = ProcessStream(served, responder)  # type: ignore[arg-type]
        stream.message_received(opening())
        stream.message_received(body())
        await settle(responder)
        stream.reset()
        assert responder.ended == [Status.INTERNAL]
        assert live(served) == 0

    asyncio.run(run())


@pytest.mark.parametrize("part", ["log", "trace"])
def test_what_cannot_be_told_of_a_turn_does_not_cost_its_answer(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    async def run() -> None:
        served, responder = gateway(), Responder()

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

        if part == "log":
            served._logs_turns = True
            monkeypatch.setattr("extproc.gateway.turn_facts", fail)
        else:
            monkeypatch.setattr(ProcessStream, "_traced", lambda _: SimpleNamespace(finish=fail))
        stream = ProcessStream(served, responder)  # type: ignore[arg-type]
        stream.message_received(opening())
        stream.message_received(body(b"no json"))
        assert responder.ended == [Status.OK]
        assert len(responder.sent) == 1
        assert live(served) == 0

    asyncio.run(run())


def test_clean_up_that_fails_does_not_keep_others_from_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a connection is lost, all its streams are reset one after the other."""

    async def run() -> None:
        served = gateway()
        streams = [ProcessStream(served, Responder()) for _ in range(3)]  # type: ignore[arg-type]

        class Broken:
            def throw(self, _: Exception) -> None:
                raise RuntimeError("generator already executing")

        monkeypatch.setattr(streams[0], "_run", Broken())
        for stream in streams:
            stream.reset()
        assert live(served) == 0

    asyncio.run(run())
