"""When traces are made at all, and that nothing a client or worker says can break a turn by its span."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from extproc.endpoints import CHAT
from extproc.errors import ConfigError
from extproc.events import Call, ForwardRequest, Leg, LegResult, header
from extproc.receipt import Outcome, Reason, Receipt
from extproc.request import ApiRequest
from extproc.tracing import Tracing, TurnTrace, start_tracing


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
def test_nothing_is_traced_unless_somebody_asks(environment) -> None:
    assert start_tracing(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
    ],
)
def test_the_standard_variables_ask(environment) -> None:
    tracing = start_tracing(environment)
    assert tracing is not None
    asyncio.run(tracing.stop())


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER=jaeger is not one of otlp, console, none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/json is not one of grpc, http/protobuf",
        ),
    ],
)
def test_what_cannot_be_done_stops_the_start(environment, complaint) -> None:
    with pytest.raises(ConfigError, match=complaint):
        start_tracing(environment)


@pytest.mark.parametrize("variable", ["OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_without_the_extra_the_message_names_the_variable_and_the_fix(monkeypatch, variable) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    value = "otlp" if variable == "OTEL_TRACES_EXPORTER" else "http://127.0.0.1:4317"
    with pytest.raises(ConfigError) as raised:
        start_tracing({variable: value})
    message = str(raised.value)
    assert message.startswith(f"{variable} asks for traces")
    assert "pip install '.[otel]' in a checkout" in message
    assert "\n" not in message


class Traced:
    """Turns whose spans end in memory."""

    def __init__(self) -> None:
        self.exported = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exported))
        self.tracing = Tracing(provider)

    def turn(self, **facts: Any) -> TurnTrace:
        return TurnTrace(self.tracing, an_exchange(**facts), lambda _: "")

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exported.get_finished_spans()}


def an_exchange(fields: dict[str, Any] | None = None, **facts: Any) -> Any:
    request = ApiRequest(CHAT, b"", {"model": "m"} if fields is None else fields, 0)
    plain = {
        "headers": (),
        "arrived_at": 0.0,
        "request": request,
        "status": 200,
        "upstream": None,
        "forwards_to": "decode",
    }
    return SimpleNamespace(**{**plain, "receipt": Receipt(outcome=Outcome.COLD), **facts})


@pytest.fixture
def traced() -> Traced:
    return Traced()


TEXT = st.text(max_size=300)
JSON = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.lists(TEXT, max_size=2)


@given(
    fields=st.fixed_dictionaries({}, optional={"model": JSON, "stream": JSON, "max_tokens": JSON}),
    headers=st.lists(
        st.tuples(st.sampled_from(["traceparent", "tracestate", "baggage", "x-request-id", "other"]), TEXT), max_size=5
    ).map(tuple),
    status=st.none() | st.integers(0, 999),
    upstream=st.none() | TEXT | st.sampled_from(["10.0.0.1:8000", "[::1]:8000", "/run/d.sock", ":", "a:²"]),
    error=st.sampled_from(["", "EventTooLarge"]),
)
def test_nothing_a_client_or_worker_says_breaks_a_span(fields, headers, status, upstream, error) -> None:
    traced = Traced()
    turn = traced.turn(fields=fields, headers=headers, status=status, upstream=upstream)
    turn.forward(ForwardRequest(b"{}"))
    turn.finish(error)
    assert len(traced.spans()) == 2
    assert all(len(name) <= 256 for name in traced.spans())
    assert len(turn.trace_id) == 32


@pytest.mark.parametrize(("by_client", "by_envoy", "expected"), [(1, 0, 1), (0, 2, 2), (1, 2, 2), (0, 0, None)])
def test_envoys_span_comes_before_the_clients(traced, by_client, by_envoy, expected) -> None:
    def named(number: int) -> str:
        return f"00-{number:032x}-{number:016x}-01" if number else ""

    exchange = an_exchange(headers=(("traceparent", named(by_client)),))
    turn = TurnTrace(traced.tracing, exchange, lambda name: named(by_envoy) if name == "traceparent" else "")
    turn.finish()
    parent = traced.spans()["chat m"].parent
    assert (None if parent is None else parent.span_id) == expected


def test_a_leg_joins_the_trace_and_loses_the_headers_of_any_other(traced) -> None:
    turn = traced.turn()
    seen: list[Call] = []

    async def perform(call: Call) -> LegResult:
        seen.append(call)
        return LegResult(status=0, body=b"", at=0.0, elapsed_seconds=1.0, error="timeout")

    call = Call(Leg.PREFILL, "/v1/completions", (("traceparent", "stale"), ("x-request-id", "r-prefill")), b"", 1.0)
    assert asyncio.run(turn.call(call, perform)).error == "timeout"
    span = traced.spans()["prefill"]
    (parent,) = [value for name, value in seen[0].headers if name == "traceparent"]
    assert parent.startswith(f"00-{turn.trace_id}-{span.context.span_id:016x}-")
    assert header(seen[0].headers, "x-request-id") == "r-prefill"
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "kvloop.request_id": "r-prefill",
        "error.type": "timeout",
    }
    assert span.status.status_code is StatusCode.ERROR


def test_a_leg_that_is_cancelled_ends_its_span(traced) -> None:
    turn = traced.turn()

    async def leave() -> None:
        task = asyncio.create_task(
            turn.call(Call(Leg.RENDER, "/", (), b"", 1.0), lambda _: asyncio.get_running_loop().create_future())
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert "render" in traced.spans()


@pytest.mark.parametrize(
    ("receipt", "status", "error", "expected"),
    [
        (Receipt(outcome=Outcome.COLD), 200, "", StatusCode.UNSET),
        (Receipt(outcome=Outcome.REFUSED, reason=Reason.CLIENT_ERROR), 404, "", StatusCode.UNSET),
        (Receipt(outcome=Outcome.DECODE_ONLY), 503, "", StatusCode.ERROR),
        (Receipt(outcome=Outcome.COLD), 200, "EventTooLarge", StatusCode.ERROR),
    ],
)
def test_a_turn_fails_by_the_servers_faults_only(traced, receipt, status, error, expected) -> None:
    traced.turn(receipt=receipt, status=status).finish(error)
    assert traced.spans()["chat m"].status.status_code is expected


def test_an_older_copy_of_opentelemetry_s_messages_is_told_with_its_fix(monkeypatch) -> None:
    def exporter(*_: str) -> None:
        raise ImportError("cannot import name", name="opentelemetry.proto.common.v1.common_pb2")

    monkeypatch.setattr("extproc.tracing._exporter", exporter)
    with pytest.raises(ConfigError, match="pip install --force-reinstall --no-deps opentelemetry-proto, or unset it"):
        start_tracing({"OTEL_TRACES_EXPORTER": "otlp"})


def test_a_collector_that_never_answers_keeps_nobody_from_stopping(monkeypatch) -> None:
    monkeypatch.setattr("extproc.tracing._LAST_EXPORT_SECONDS", 0.01)
    traced, begun, answers = Traced(), threading.Event(), threading.Event()

    def shutdown() -> None:
        begun.set()
        answers.wait()

    traced.tracing._provider = SimpleNamespace(shutdown=shutdown)
    asyncio.run(traced.tracing.stop())
    assert begun.wait(30)
    assert not answers.is_set()
    answers.set()
