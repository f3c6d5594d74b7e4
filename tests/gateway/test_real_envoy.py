"""What the rendered configuration does in a real Envoy: scripted workers behind it, a scripted ext_proc beside it."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import socket
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import grpc
import pytest
from aiohttp import WSMsgType, web
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as wire_grpc
from envoy.type.v3.http_status_pb2 import HttpStatus
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import headers
from extproc.envoy_binary import envoy_command, validate
from extproc.envoy_config import render
from extproc.errors import ConfigError
from extproc.settings import EnvoySettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

pytestmark = pytest.mark.gateway

CHAT = "/v1/chat/completions"
PATIENCE_SECONDS = 20.0
T = TypeVar("T")


def until(fact: Callable[[], T | Literal[False] | None]) -> T:
    """Wait for ``fact`` to return something true, and return it; fail when it never does."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        if found := fact():
            return found
        time.sleep(0.02)
    raise AssertionError(f"still not true after {PATIENCE_SECONDS} s: {fact}")


# --- scripted workers -----------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One request as a worker got it; ``headers`` has lower-case names."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Worker:
    """A worker that records what reaches it and does what ``x-test-worker`` says."""

    name: str
    healthy: bool = True
    seen: list[Seen] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._echo(request)
        body = await request.read()
        names = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.method, request.raw_path, names, body))
        match names.get("x-test-worker"):
            case "reset":
                assert request.transport is not None
                request.transport.abort()
            case "error":
                return web.json_response({"worker": self.name}, status=500)
            case "wait":
                await self.release.wait()
            case "stream":
                return await self._stream(request)
        return web.json_response(
            {"worker": self.name, "bytes": len(body)},
            headers={"x-kvloop-upstream": "spoofed", "x-kvloop-anything": "leaked", "x-other": "kept"},
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(3):
            await response.write(b"data: %d\n\n" % index)
            await asyncio.sleep(0.05)
        return response

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        socket_ = web.WebSocketResponse()
        await socket_.prepare(request)
        async for message in socket_:
            if message.type == WSMsgType.TEXT:
                await socket_.send_str(message.data)
        return socket_


# --- a scripted ext_proc --------------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """One ext_proc stream: the kinds of messages Envoy sent, in order, and what they carried."""

    metadata: dict[str, str]
    kinds: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    response_chunks: list[bytes] = field(default_factory=list)
    modes: tuple[int, int] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> str:
        return self.headers.get("x-test-script", "leave")

    def note(self, message: wire.ProcessingRequest) -> str:
        """Record what Envoy sent and return its kind."""
        kind = str(message.WhichOneof("request"))
        self.kinds.append(kind)
        if message.HasField("protocol_config"):
            self.modes = (message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)
        if message.attributes:
            fields = message.attributes["envoy.filters.http.ext_proc"].fields
            self.attributes |= {name: value.string_value or value.number_value for name, value in fields.items()}
        match kind:
            case "request_headers":
                self.headers = _headers(message.request_headers)
            case "request_body":
                self.body += message.request_body.body
            case "response_body":
                self.response_chunks.append(message.response_body.body)
        return kind


def _headers(message: wire.HttpHeaders) -> dict[str, str]:
    return {header.key: header.raw_value.decode() or header.value for header in message.headers.headers}


def _mutation(**values: str) -> wire.HeaderMutation:
    options = [
        HeaderValueOption(
            header=HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in values.items()
    ]
    return wire.HeaderMutation(set_headers=options)


class Processor(wire_grpc.ExternalProcessorServicer):  # type: ignore[misc] # generated without types
    """Does what the request header ``x-test-script`` says.

    ``leave``: echo the request, leave at the response headers. ``watch``: echo, see every response chunk. ``refuse``:
    answer by itself, marked verbatim. ``refuse-unmarked``: the same without the mark. ``die``: end the stream with
    UNAVAILABLE after the whole body was read, unless a replica died on the same ``x-test-mark`` before. ``silent``:
    never answer.
    """

    def __init__(self, deaths: set[str] | None = None) -> None:
        self.exchanges: list[Exchange] = []
        self.port = 0
        self._deaths = set() if deaths is None else deaths

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server()
        wire_grpc.add_ExternalProcessorServicer_to_server(self, self._server)
        servicer = health.aio.HealthServicer()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.port = self._server.add_insecure_port(address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Process(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[wire.ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[wire.ProcessingResponse]:
        exchange = Exchange({str(key): str(value) for key, value in context.invocation_metadata() or ()})
        self.exchanges.append(exchange)
        async for message in request_iterator:
            kind = exchange.note(message)
            if kind.startswith("response_"):
                for answer in self._answer_response(exchange, kind):
                    yield answer
            elif exchange.script.startswith("refuse"):
                yield self._refusal(exchange)
                return
            elif exchange.script != "silent" and getattr(message, kind).end_of_stream:
                if exchange.script == "die" and exchange.headers["x-test-mark"] not in self._deaths:
                    self._deaths.add(exchange.headers["x-test-mark"])
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
                for answer in self._answer_request(exchange, has_body=kind == "request_body"):
                    yield answer

    def _answer_request(self, exchange: Exchange, *, has_body: bool) -> Iterator[wire.ProcessingResponse]:
        conversation = exchange.headers.get("x-test-conversation", "none")
        common = wire.CommonResponse(header_mutation=_mutation(x_kvloop_conversation=conversation))
        yield wire.ProcessingResponse(request_headers=wire.HeadersResponse(response=common))
        if not has_body:
            return
        size = 62_000
        pieces = [exchange.body[start : start + size] for start in range(0, len(exchange.body), size)] or [b""]
        for index, piece in enumerate(pieces, start=1):
            streamed = wire.StreamedBodyResponse(body=piece, end_of_stream=index == len(pieces))
            body = wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=streamed))
            yield wire.ProcessingResponse(request_body=wire.BodyResponse(response=body))

    def _answer_response(self, exchange: Exchange, kind: str) -> Iterator[wire.ProcessingResponse]:
        if kind == "response_headers":
            common = wire.CommonResponse(header_mutation=_mutation(x_kvloop_receipt="outcome=cold"))
            answer = wire.ProcessingResponse(response_headers=wire.HeadersResponse(response=common))
            answer.dynamic_metadata.update({"kvloop": {"outcome": "cold", "reused_tokens": 0}})
            if exchange.script == "leave":
                answer.mode_override.CopyFrom(
                    ProcessingMode(
                        request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
                        response_body_mode=ProcessingMode.NONE,
                        response_trailer_mode=ProcessingMode.SKIP,
                    )
                )
            yield answer
        elif kind == "response_body":
            yield wire.ProcessingResponse(response_body=wire.BodyResponse())

    def _refusal(self, exchange: Exchange) -> wire.ProcessingResponse:
        response = wire.ProcessingResponse(
            immediate_response=wire.ImmediateResponse(
                status=HttpStatus(code=503),
                headers=_mutation(content_type="application/json", x_from="ext_proc"),
                body=b'{"error": {"message": "from ext_proc"} }',
            )
        )
        if exchange.script == "refuse":
            response.dynamic_metadata.update({"kvloop": {headers.VERBATIM: True, "outcome": "refused"}})
        return response


# --- Envoy and its surroundings ----------------------------------------------------------------------------------------


class Background:
    """An event loop in a thread, for servers that tests talk to with blocking clients."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        waiting: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return waiting.result(PATIENCE_SECONDS)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    address: str,
    target: str,
    *,
    method: str = "POST",
    body: bytes | None = b"{}",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one HTTP/1.1 request with ``target`` exactly as spelt."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())
    finally:
        connection.close()


@dataclass
class Gateway:
    """A running Envoy."""

    settings: EnvoySettings
    access_log: Path

    def post(self, target: str = CHAT, body: bytes | None = b"{}", **headers: str) -> Answer:
        return call(self.settings.listen, target, body=body, headers=_dashed(headers))

    def get(self, target: str, **headers: str) -> Answer:
        return call(self.settings.listen, target, method="GET", body=None, headers=_dashed(headers))

    def leg(self, target: str = CHAT, body: bytes = b"{}", **headers: str) -> Answer:
        return call(self.settings.prefill_listen, target, body=body, headers=_dashed(headers))

    def stat(self, name: str) -> int:
        text = call(self.settings.admin_listen, f"/stats?filter=^{name}$", method="GET", body=None).body.decode()
        return int(text.partition(": ")[2])

    def log_of(self, request_id: str) -> dict[str, Any]:
        """Return the access log entry of the request Envoy gave this id."""

        def entry() -> dict[str, Any] | None:
            lines = [json.loads(line) for line in self.access_log.read_text().splitlines()]
            return next((line for line in lines if line["request_id"] == request_id), None)

        return until(entry)


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@dataclass
class Stage:
    """Two P, three D and two ext_proc replicas, shared by all tests; each test forgets what came before."""

    prefill: list[Worker]
    decode: list[Worker]
    processors: list[Processor]

    def forget(self) -> None:
        for worker in (*self.prefill, *self.decode):
            worker.seen.clear()
            worker.healthy = True
        for processor in self.processors:
            processor.exchanges.clear()

    @property
    def decode_seen(self) -> list[Seen]:
        return [seen for worker in self.decode for seen in worker.seen]

    @property
    def prefill_seen(self) -> list[Seen]:
        return [seen for worker in self.prefill for seen in worker.seen]

    @property
    def exchanges(self) -> list[Exchange]:
        return [exchange for processor in self.processors for exchange in processor.exchanges]


def addresses(servers: list[Any]) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{server.port}" for server in servers)


@contextmanager
def running(folder: Path, stage: Stage, **settings: Any) -> Iterator[Gateway]:
    """Run Envoy before ``stage`` on a rendered configuration until the block ends; ``settings`` win over the stage's."""
    listen, prefill_listen, admin_listen = free_addresses(3)
    usual = {
        "listen": listen,
        "prefill_listen": prefill_listen,
        "admin_listen": admin_listen,
        "extproc": addresses(stage.processors),
        "prefill": addresses(stage.prefill),
        "decode": addresses(stage.decode),
        "access_log": str(folder / "access.jsonl"),
        "health_interval_seconds": 0.1,
    }
    built = EnvoySettings(**{**usual, **settings})
    config = folder / "envoy.yaml"
    config.write_text(render(built))
    with (folder / "envoy.log").open("wb") as log:
        argv = [*envoy_command(config, concurrency=1), "--file-flush-interval-msec", "20"]
        process = subprocess.Popen(argv, stdout=log, stderr=log)  # noqa: S603 - our own argv
    try:
        until(lambda: process.poll() is not None or _is_ready(admin_listen))
        assert process.poll() is None, (folder / "envoy.log").read_text()
        yield Gateway(built, folder / "access.jsonl")
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _is_ready(admin: str) -> bool:
    try:
        return call(admin, "/ready", method="GET", body=None).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    started = Background()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def shared_stage(background: Background) -> Iterator[Stage]:
    deaths: set[str] = set()
    stage = Stage(
        [Worker("p0"), Worker("p1")],
        [Worker("d0"), Worker("d1"), Worker("d2")],
        [Processor(deaths), Processor(deaths)],
    )
    servers: list[Worker | Processor] = [*stage.prefill, *stage.decode, *stage.processors]
    for server in servers:
        background.run(server.start())
    yield stage
    for server in servers:
        background.run(server.stop())


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.forget()
    return shared_stage


@pytest.fixture(scope="module")
def shared_gateway(shared_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("envoy"), shared_stage) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway, stage: Stage) -> Gateway:  # noqa: ARG001 - a clean stage comes first
    until(lambda: shared_gateway.stat("cluster.decode.membership_healthy") == 3)
    until(lambda: shared_gateway.stat("cluster.prefill.membership_healthy") == 2)
    return shared_gateway


# --- the configuration itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decode": ("[::1]:8200", "10.0.0.7:8200"), "listen": "[::1]:10000"},
        {"prefill": ("prefill.svc:8000",), "extproc": ("kvloop:50051", "127.0.0.1:50051")},
        {"access_log": "/dev/null", "refused_paths": ()},
    ],
    ids=["defaults", "ipv6", "names", "bare"],
)
def test_envoy_accepts_what_is_rendered(settings: dict[str, Any]) -> None:
    validate(render(EnvoySettings(**settings)))


def test_envoy_names_an_unknown_field_on_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("admin: {adress: here}")
    with pytest.raises(ConfigError, match="no such field: 'adress'") as refused:
        validate(broken)
    assert "\n" not in str(refused.value)


def test_a_long_complaint_keeps_its_end_where_the_reason_stands() -> None:
    broken = render(EnvoySettings()).replace("port_value: 10000", "port_value: 70000")
    with pytest.raises(ConfigError, match="value must be less than or equal to 65535") as refused:
        validate(broken)
    assert len(str(refused.value)) < 1100


# --- handled paths ----------------------------------------------------------------------------------------------------


def test_request_is_full_duplex_and_response_streamed(gateway: Gateway, stage: Stage) -> None:
    assert gateway.post(CHAT).status == 200
    (exchange,) = stage.exchanges
    assert exchange.modes == (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.STREAMED)


def test_ext_proc_learns_its_role_the_request_id_and_the_worker(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.post(CHAT)
    (exchange,) = stage.exchanges
    assert exchange.metadata["x-kvloop-role"] == "gateway"
    assert exchange.attributes == {
        "request.id": answer.headers["x-request-id"],
        "upstream.address": f"127.0.0.1:{_server_of(answer, stage).port}",
        "upstream.request_attempt_count": 1,
        "response.code": 200,
    }


def _server_of(answer: Answer, stage: Stage) -> Worker:
    return next(worker for worker in stage.decode if worker.name == answer.json["worker"])


def test_override_at_the_response_headers_ends_ext_procs_part(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.post(CHAT, x_test_worker="stream", x_test_script="leave")
    assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    (exchange,) = stage.exchanges
    assert exchange.kinds[-1] == "response_headers"
    assert exchange.response_chunks == []


def test_without_the_override_ext_proc_sees_every_byte(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.post(CHAT, x_test_worker="stream", x_test_script="watch")
    (exchange,) = stage.exchanges
    assert b"".join(exchange.response_chunks) == answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_hazard_23_26_twenty_megabytes_pass_unchanged(gateway: Gateway, stage: Stage) -> None:
    body = bytes(range(256)) * (20 * 1024 * 1024 // 256)
    assert gateway.post(CHAT, body).json["bytes"] == len(body)
    (seen,) = stage.decode_seen
    assert hashlib.sha256(seen.body).digest() == hashlib.sha256(body).digest()


def test_one_conversation_stays_on_one_decode_worker(gateway: Gateway) -> None:
    served = {
        conversation: {gateway.post(CHAT, x_test_conversation=conversation).json["worker"] for _ in range(3)}
        for conversation in map(str, range(50))  # enough that each worker is home to some, whatever its port
    }
    assert [len(workers) for workers in served.values()] == [1] * 50
    assert set().union(*served.values()) == {"d0", "d1", "d2"}


@pytest.mark.parametrize("attempt", range(6))
def test_hazard_07_25_a_replica_that_dies_before_answering_is_replaced_by_another(
    gateway: Gateway, stage: Stage, attempt: int
) -> None:
    body = b"x" * 20_000
    assert gateway.post(CHAT, body, x_test_script="die", x_test_mark=f"replayed {attempt}").status == 200
    assert [[exchange.body for exchange in processor.exchanges] for processor in stage.processors] == [[body], [body]]
    assert [seen.body for seen in stage.decode_seen] == [body]


def test_hazard_25_a_body_above_64_kib_is_not_replayed_but_refused_whole(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.post(CHAT, b"x" * 70_000, x_test_script="die", x_test_mark="too large")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert len(stage.exchanges) == 1
    assert stage.decode_seen == []


# --- what clients may not steer -----------------------------------------------------------------------------------------

STEERING = {
    "x-kvloop-conversation": "mine",
    "X-KVLoop-Secret": "guessed",
    "x-kvloop-unheard-of": "1",
    "x-kvloop-ending": "true",
    "x-data-parallel-rank": "3",
    "x-gateway-destination-endpoint": "10.0.0.1:80",
    "x-envoy-retry-on": "5xx",
    "x-envoy-max-retries": "5",
    "x-envoy-upstream-rq-timeout-ms": "1",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_hazard_42_steering_headers_of_a_client_reach_nobody(gateway: Gateway, stage: Stage, path: str) -> None:
    answer = call(gateway.settings.listen, path, headers={**STEERING, "x-mine": "kept", "x-kvloop-end": "true"})
    assert answer.status == 200
    (seen,) = stage.decode_seen
    assert {exchange.headers["x-kvloop-end"] for exchange in stage.exchanges} <= {"true"}
    everyone = [seen.headers, *(exchange.headers for exchange in stage.exchanges)]
    forbidden = {name.lower() for name in STEERING} - {"x-kvloop-conversation"}
    for seen_headers in everyone:
        assert seen_headers["x-mine"] == "kept"
        assert not forbidden & set(seen_headers)
        assert seen_headers.get("x-kvloop-conversation") in (None, "none")


def test_a_client_does_not_choose_the_request_id(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.post(CHAT, x_request_id="chosen")
    (seen,) = stage.decode_seen
    assert seen.headers["x-request-id"] == answer.headers["x-request-id"] != "chosen"


def test_a_session_header_with_an_underscore_arrives(gateway: Gateway, stage: Stage) -> None:
    call(gateway.settings.listen, CHAT, headers={"session_id": "s1"})
    (exchange,) = stage.exchanges
    assert exchange.headers["session_id"] == "s1"


def test_clients_see_the_receipt_and_no_other_internal_header(gateway: Gateway) -> None:
    handled, untouched = gateway.post(CHAT), gateway.get("/v1/models")
    assert handled.headers["x-kvloop-receipt"] == "outcome=cold"
    assert [name for name in handled.headers if name.startswith("x-kvloop-")] == ["x-kvloop-receipt"]
    assert [name for name in untouched.headers if name.startswith(("x-kvloop-", "x-envoy-"))] == []
    assert handled.headers["x-other"] == untouched.headers["x-other"] == "kept"


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        CHAT,
        "/v1/completions",
        "/v1/chat/completions?x=1",
        "/v1/chat/complet%69ons",
        "/%76%31/chat/%63ompletions",
        "//v1/chat/completions",
        "/v1//chat///completions",
        "/v1/./chat/completions",
        "/v1/%2e/chat/completions",
        "/v1/x/../chat/completions",
        "/v1\\chat\\completions",
        "http://elsewhere/v1/chat/completions",
    ],
)
def test_every_spelling_of_a_handled_path_goes_through_ext_proc(gateway: Gateway, stage: Stage, target: str) -> None:
    assert gateway.post(target).status == 200
    (seen,) = stage.decode_seen
    assert seen.target.partition("?")[0] in (CHAT, "/v1/completions")
    assert len(stage.exchanges) == 1


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/chat/completions%0A", 404),
        ("/v1/completions%0a", 404),
        ("/v1/completions%7f", 404),
        ("/v1/chat%2Fcompletions", 400),
        ("/v1%5cchat/completions", 400),
        ("/v1/chat/completions%00", 400),
        ("/v1/chat/completions#x", 400),
        ("/invocations", 404),
        ("/invocat%69ons", 404),
        ("/inference/v1/generate?x", 404),
        ("//abort_requests", 404),
    ],
)
def test_a_path_that_would_sneak_past_ext_proc_is_refused_in_json(
    gateway: Gateway, stage: Stage, target: str, status: int
) -> None:
    answer = gateway.post(target)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert stage.decode_seen == []


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/v1/embeddings",
        "/v1/chat/completions/",
        "/v1/chat/completions/render",
        "/v1/chat/completions;x=1",
        "/v1/chat/complet%2569ons",
        "/v1/chat/completions%3Fx",
        "/V1/chat/completions",
        "/files/a%20b%C3%A9?q=%0A",
    ],
)
def test_hazard_48_other_paths_pass_as_they_are_without_ext_proc(gateway: Gateway, stage: Stage, target: str) -> None:
    assert gateway.post(target, b"bytes").status == 200
    (seen,) = stage.decode_seen
    assert (seen.target, seen.body, stage.exchanges) == (target, b"bytes", [])


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_hazard_31_no_method_on_a_handled_path_avoids_ext_proc(gateway: Gateway, stage: Stage, method: str) -> None:
    assert call(gateway.settings.listen, CHAT, method=method, body=None).status == 200
    assert len(stage.exchanges) == 1


def _upgrade(address: str, path: str) -> tuple[bytes, socket.socket]:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    connection.sendall(
        f"GET {path} HTTP/1.1\r\nHost: gateway\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        received = connection.recv(4096)
        assert received, head
        head += received
    return head, connection


def test_hazard_31_48_a_websocket_on_another_path_carries_messages(gateway: Gateway) -> None:
    head, connection = _upgrade(gateway.settings.listen, "/v1/realtime")
    with connection:
        assert head.startswith(b"HTTP/1.1 101 ")
        connection.sendall(b"\x81\x82\x00\x00\x00\x00hi")  # a masked text frame, mask 0
        assert connection.recv(4, socket.MSG_WAITALL) == b"\x81\x02hi"


def test_hazard_31_a_websocket_on_a_handled_path_is_refused(gateway: Gateway, stage: Stage) -> None:
    head, connection = _upgrade(gateway.settings.listen, CHAT)
    connection.close()
    assert head.startswith(b"HTTP/1.1 403 ")
    assert stage.decode_seen == []


# --- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_hazard_07_25_a_worker_that_resets_gets_the_request_once(gateway: Gateway, stage: Stage, path: str) -> None:
    answer = call(
        gateway.settings.listen,
        path,
        body=b"y" * 100_000,
        headers={"x-test-worker": "reset", "x-envoy-retry-on": "reset,5xx", "x-envoy-max-retries": "3"},
    )
    assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")
    assert [len(seen.body) for seen in stage.decode_seen] == [100_000]


def test_hazard_07_25_a_prefill_worker_that_resets_gets_the_leg_once(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.leg(CHAT, b"z" * 100_000, x_test_worker="reset")
    assert answer.status == 503
    assert [len(seen.body) for seen in stage.prefill_seen] == [100_000]


def test_an_unhealthy_decode_worker_is_left_out_and_its_conversations_move(gateway: Gateway, stage: Stage) -> None:
    def serving() -> str:
        return str(gateway.post(CHAT, x_test_conversation="c").json["worker"])

    home = serving()
    next(worker for worker in stage.decode if worker.name == home).healthy = False
    moved = until(lambda: (now := serving()) != home and now)
    assert [serving() for _ in range(5)] == [moved] * 5


def test_the_last_healthy_decode_worker_serves_alone(gateway: Gateway, stage: Stage) -> None:
    def serving() -> set[str]:
        return {gateway.post(CHAT, x_test_conversation=str(index)).json["worker"] for index in range(10)}

    stage.decode[0].healthy = stage.decode[1].healthy = False
    until(lambda: gateway.stat("cluster.decode.membership_healthy") == 1)
    until(lambda: serving() == {"d2"})
    assert [serving() for _ in range(3)] == [{"d2"}] * 3


def test_an_unhealthy_prefill_worker_is_left_out(gateway: Gateway, stage: Stage) -> None:
    stage.prefill[0].healthy = False
    until(lambda: gateway.stat("cluster.prefill.membership_healthy") == 1)
    until(lambda: gateway.leg().json["worker"] == "p1")
    assert [gateway.leg().json["worker"] for _ in range(10)] == ["p1"] * 10


def test_no_prefill_worker_is_an_error_without_a_workers_address(gateway: Gateway, stage: Stage) -> None:
    for worker in stage.prefill:
        worker.healthy = False
    answer = until(lambda: (now := gateway.leg()).status == 503 and now)
    assert answer.json["error"]["code"] == "service_unavailable"
    assert "x-kvloop-upstream" not in answer.headers


def test_no_decode_worker_is_an_honest_error(gateway: Gateway, stage: Stage) -> None:
    for worker in stage.decode:
        worker.healthy = False
    answer = until(lambda: (now := gateway.post(CHAT)).status == 503 and now)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "error": {
            "message": "No worker or processor is available for this request. Try again.",
            "type": "server_error",
            "param": None,
            "code": "service_unavailable",
        }
    }


def test_what_ext_proc_answers_itself_is_not_reworded(gateway: Gateway) -> None:
    answer = gateway.post(CHAT, x_test_script="refuse")
    assert (answer.status, answer.headers["content-type"]) == (503, "application/json")
    assert answer.body == b'{"error": {"message": "from ext_proc"} }'
    assert answer.headers["x-from"] == "ext_proc"
    assert "retry-after" not in answer.headers


def test_without_the_verbatim_mark_it_is_reworded(gateway: Gateway) -> None:
    answer = gateway.post(CHAT, x_test_script="refuse-unmarked")
    assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")


def test_hazard_29_without_ext_proc_handled_paths_fail_closed_and_others_work(stage: Stage, tmp_path: Path) -> None:
    with running(tmp_path, stage, extproc=tuple(free_addresses(1))) as gateway:
        answer = gateway.post(CHAT, b'{"kv_transfer_params": {}}')
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["error"]["code"] == "service_unavailable"
        assert stage.decode_seen == []
        assert gateway.get("/v1/models").status == 200


def test_a_replica_that_starts_after_envoy_is_found(background: Background, stage: Stage, tmp_path: Path) -> None:
    late = Processor()
    (address,) = free_addresses(1)
    with running(tmp_path, stage, extproc=(address,)) as gateway:
        assert gateway.post(CHAT).status == 503
        background.run(late.start(address))
        until(lambda: gateway.post(CHAT).status == 200)
    background.run(late.stop())


def test_a_silent_ext_proc_is_given_up_in_json(stage: Stage, tmp_path: Path) -> None:
    with running(tmp_path, stage, stream_idle_timeout_seconds=0.3) as gateway:
        answer = gateway.post(CHAT, x_test_script="silent")
    assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
    assert stage.decode_seen == []


def test_five_resets_set_a_decode_worker_aside_and_errors_of_the_model_do_not(stage: Stage, tmp_path: Path) -> None:
    with running(tmp_path, stage) as envoy:

        def post(worker_does: str) -> Answer:
            return envoy.post(CHAT, x_test_conversation="c", x_test_worker=worker_does)

        home = post("error").json["worker"]
        assert [post("error").json["worker"] for _ in range(10)] == [home] * 10
        assert envoy.stat("cluster.decode.outlier_detection.ejections_active") == 0
        for _ in range(5):
            post("reset")
        until(lambda: envoy.stat("cluster.decode.outlier_detection.ejections_active") == 1)
        away = until(lambda: (now := post("error").json["worker"]) != home and now)
        probes = envoy.stat("cluster.decode.health_check.success")
        until(lambda: envoy.stat("cluster.decode.health_check.success") > probes + 6)
        assert post("error").json["worker"] == away, "a passed health check does not end its time aside"


def test_the_only_decode_worker_is_never_set_aside(stage: Stage, tmp_path: Path) -> None:
    with running(tmp_path, stage, decode=addresses(stage.decode[:1])) as gateway:
        for _ in range(10):
            gateway.post(CHAT, x_test_worker="reset")
        assert [gateway.post(CHAT).status for _ in range(3)] == [200] * 3


def test_workers_may_be_named(stage: Stage, tmp_path: Path) -> None:
    named = tuple(f"localhost:{worker.port}" for worker in stage.decode)
    with running(tmp_path, stage, decode=named) as gateway:
        served = {gateway.post(CHAT, x_test_conversation=str(index)).json["worker"] for index in range(50)}
    assert served == {"d0", "d1", "d2"}


def test_clients_at_their_limit_leave_legs_and_admin_alone(stage: Stage, tmp_path: Path) -> None:
    with running(tmp_path, stage, max_client_connections=1) as envoy:
        host, _, port = envoy.settings.listen.rpartition(":")
        with socket.create_connection((host, int(port))):
            until(lambda: envoy.stat(f"listener.{host}_{port}.downstream_cx_active") == 1)
            with pytest.raises((OSError, http.client.HTTPException)):
                envoy.post(CHAT)
            assert envoy.leg().status == 200


# --- the prefill listener and the logs ----------------------------------------------------------------------------------


def test_a_leg_is_answered_with_the_address_of_its_worker(gateway: Gateway, stage: Stage) -> None:
    answer = gateway.leg()
    port = next(worker.port for worker in stage.prefill if worker.name == answer.json["worker"])
    assert answer.headers["x-kvloop-upstream"] == f"127.0.0.1:{port}"
    assert stage.exchanges == []


def test_a_leg_goes_to_the_least_busy_prefill_worker(gateway: Gateway, stage: Stage) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.leg, x_test_worker="wait")
        (busy,) = until(lambda: [worker for worker in stage.prefill if worker.seen])
        others = [gateway.leg().json["worker"] for _ in range(10)]
        busy.loop.call_soon_threadsafe(busy.release.set)
        assert waiting.result(PATIENCE_SECONDS).status == 200
    assert busy.name not in others


def test_the_secret_and_request_id_of_a_leg_reach_the_worker(gateway: Gateway, stage: Stage) -> None:
    gateway.leg(x_kvloop_secret="s3cret", x_request_id="leg-1")
    (seen,) = stage.prefill_seen
    assert (seen.headers["x-kvloop-secret"], seen.headers["x-request-id"]) == ("s3cret", "leg-1")


def test_the_access_log_tells_what_kvloop_did(gateway: Gateway) -> None:
    answer = gateway.post(f"{CHAT}?key=private", b'{"prompt": "private"}', x_test_conversation="private")
    entry = gateway.log_of(answer.headers["x-request-id"])
    assert entry["kvloop"] == {"outcome": "cold", "reused_tokens": 0}
    assert (entry["listener"], entry["route"], entry["path"], entry["status"]) == ("main", CHAT, CHAT, 200)
    assert (entry["details"], entry["attempts"]) == ("via_upstream", 1)
    assert "private" not in json.dumps(entry)


def test_the_access_log_names_the_reason_of_an_envoy_error(gateway: Gateway) -> None:
    answer = gateway.post("/invocations")
    entry = gateway.log_of(answer.headers["x-request-id"])
    assert (entry["status"], entry["route"], entry["details"]) == (404, "refused", "direct_response")


def test_the_access_log_names_the_leg(gateway: Gateway, stage: Stage) -> None:
    gateway.leg(x_kvloop_leg="render", x_request_id="leg-2")
    entry = gateway.log_of("leg-2")
    assert (entry["listener"], entry["leg"]) == ("prefill", "render")
    assert entry["upstream"] in addresses(stage.prefill)
