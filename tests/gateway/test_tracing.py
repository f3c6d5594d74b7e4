"""Traces, through the real Envoy into a real OTLP receiver: one span per turn, one per leg, joined to everybody else's."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from gateway_harness import HOST, free_ports
from otlp_collector import Collector, ReceivedSpan

SERVER, CLIENT = 2, 3
ERROR = 2
QUESTION = "a question nobody may find in a trace " * 40


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


def exporting(collector: Collector, **variables: str) -> dict[str, str]:
    """Variables that make ext_proc export at once."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc_endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50", **variables}


def traceparent() -> tuple[str, str, str]:
    """A client's trace id, its span's id, and the header that says so."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-01"


def spans_of(gateway: Any, collector: Collector, trace: str, count: int) -> dict[str, ReceivedSpan]:
    """The spans of one trace by name, once there are so many."""

    def all_there() -> dict[str, ReceivedSpan] | None:
        found = {span.name: span for span in list(collector.spans) if span.trace == trace}
        return found if len(found) >= count else None

    return gateway.until(all_there, f"{count} spans of the trace have arrived")


def test_a_turn_is_one_span_with_a_child_per_leg(start_gateway, collector) -> None:
    gateway = start_gateway(extproc_env=exporting(collector))
    chat = gateway.new_chat(max_tokens=20)
    chat.say(QUESTION)
    trace, client_span, header = traceparent()
    gateway.fleet.reset()
    answer = chat.say("And then?", headers={"traceparent": header})
    assert answer.outcome == "reused"
    spans = spans_of(gateway, collector, trace, 4)
    assert spans.keys() == {"chat sim", "render", "prefill", "decode"}
    turn = spans["chat sim"]

    # The client's trace goes on, and every leg is part of it.
    assert (turn.parent, turn.kind) == (client_span, SERVER)
    assert {spans[leg].parent for leg in ("render", "prefill", "decode")} == {turn.id}
    assert {spans[leg].kind for leg in ("render", "prefill", "decode")} == {CLIENT}
    sent = {
        "render": gateway.received("prefill", leg="render"),
        "prefill": gateway.received("prefill", leg="prefill"),
        "decode": gateway.received("decode", path="/v1/chat/completions"),
    }
    for leg, (received,) in sent.items():
        assert received.headers["traceparent"] == f"00-{trace}-{spans[leg].id}-01"

    # In the order in which things happened, one after the other.
    render, prefill, decode = (spans[leg] for leg in ("render", "prefill", "decode"))
    assert turn.start <= render.start <= render.end <= prefill.start <= prefill.end <= decode.start <= decode.end
    assert decode.end <= turn.end
    assert decode.start <= decode.events["first_token"] <= decode.end

    # What it was and what became of it, in the words of the GenAI conventions.
    said = turn.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "sim"
    assert said["gen_ai.request.max_tokens"] == 20
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.usage.input_tokens"] == answer.receipt["prompt"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == answer.receipt["reused"]
    assert said["kvloop.outcome"] == "reused"
    assert said["kvloop.captured"] == "kept"
    assert said["http.response.status_code"] == 200
    assert prefill.attributes["http.response.status_code"] == 200
    assert f"{prefill.attributes['server.address']}:{prefill.attributes['server.port']}" in {
        worker.address for worker in gateway.fleet.prefill
    }
    assert turn.resource["service.name"] == "kvloop"

    # Neither what was said nor who said it.
    everything = b"".join(collector.raw)
    for secret in (
        b"a question nobody",
        chat.conversation.encode(),
        gateway.secret.encode(),
        answer.text.encode()[:30],
    ):
        assert secret not in everything


def test_envoys_own_spans_and_ours_are_one_trace(start_gateway, collector) -> None:
    address = collector.grpc_endpoint.removeprefix("http://")
    gateway = start_gateway(extproc_env=exporting(collector), envoy={"otlp": address})
    chat = gateway.new_chat(max_tokens=5)
    chat.say(QUESTION)
    gateway.fleet.reset()
    trace, client_span, header = traceparent()
    assert chat.say("And then?", headers={"traceparent": header}).outcome == "reused"

    def all_there() -> dict[str, ReceivedSpan] | None:
        found = {span.id: span for span in list(collector.spans) if span.trace == trace}
        return found if len(found) >= 11 else None

    # Envoy hands its spans over every five seconds.
    spans = gateway.until(all_there, "Envoy's and our spans have arrived")

    def line(span: ReceivedSpan) -> list[str]:
        """Names from a span up to the client's."""
        above = spans.get(span.parent)
        assert above is not None or span.parent == client_span
        return [span.name, *(line(above) if above else [])]

    def sender(leg: list[Any]) -> list[str]:
        """The same for the span a worker's own would hang on."""
        (received,) = leg
        return line(spans[received.headers["traceparent"].split("-")[2]])

    turn = ["chat sim", "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress", "ingress"]
    assert line(next(span for span in spans.values() if span.name == "decode")) == ["decode", *turn]
    # Any P can render; prefills go to the conversation's own.
    for leg, cluster in (("render", "prefill"), ("prefill", "prefill_by_conversation")):
        assert sender(gateway.received("prefill", leg=leg)) == [
            f"router {cluster} egress",
            "ingress",
            leg,
            *turn,
        ]
    assert sender(gateway.received("decode", path="/v1/chat/completions")) == ["router decode egress", "ingress"]


def test_a_failed_leg_and_its_turn_say_so(start_gateway, collector) -> None:
    gateway = start_gateway(extproc_env=exporting(collector, KVLOOP_PREFILL_TIMEOUT_SECONDS="5"))
    (prefill,) = gateway.fleet.prefill
    gateway.crash_worker(prefill)
    trace, _, header = traceparent()
    answer = gateway.new_chat().say("hi", headers={"traceparent": header})
    assert answer.outcome == "decode_only"
    spans = spans_of(gateway, collector, trace, 3)
    assert spans["prefill"].status == ERROR
    assert spans["prefill"].attributes["error.type"] == "503"
    assert spans["chat sim"].attributes["kvloop.reason"] == "prefill_failed"
    assert spans["chat sim"].status != ERROR, "the client got its answer"
    gateway.start_worker(prefill)


def test_a_request_without_a_trace_begins_one_over_http(start_gateway, collector) -> None:
    env = exporting(
        collector,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.http_endpoint,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_SERVICE_NAME="front-door",
        KVLOOP_TURN_LOG_LEVEL="info",
    )
    gateway = start_gateway(extproc_env=env)
    gateway.completions("c", "hello", headers={"traceparent": "nonsense"})
    turn = gateway.until(lambda: next((span for span in collector.spans if span.parent == ""), None))
    assert turn.name == "text_completion sim"
    assert turn.resource["service.name"] == "front-door"
    (received,) = gateway.received("decode", path="/v1/completions")
    assert received.headers["traceparent"].split("-")[1] == turn.trace
    # The log line of the turn can be joined to its trace and to Envoy's access log.
    line = gateway.until(lambda: turn_lines(gateway))[0]
    assert line["trace_id"] == turn.trace
    assert line["request_id"] == turn.attributes["kvloop.request_id"]
    assert line["conversation"] == turn.attributes["gen_ai.conversation.id"] != "c"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_gone_costs_spans_and_no_request(start_gateway, protocol) -> None:
    (port,) = free_ports(1)
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        "OTEL_BSP_MAX_QUEUE_SIZE": "4",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    gateway = start_gateway(extproc_env=env)
    chat = gateway.new_chat(max_tokens=5)
    chat.say(QUESTION)
    for _ in range(5):
        assert chat.say("more").outcome == "reused"
    gateway.stop_extproc()
    lines = (gateway.directory / "extproc-0.log").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "stopped", "nothing but JSON, and an orderly end"
    assert all(json.loads(line) for line in lines)


def turn_lines(gateway: Any) -> list[dict[str, Any]]:
    """What ext_proc logged of ended turns."""
    lines = (gateway.directory / "extproc-0.log").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "turn_finished"]
