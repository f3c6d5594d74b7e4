"""Logs are JSON objects, one a line, whoever speaks; a turn's line can be joined to everything else and names nobody."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from extproc.log import trace_id, turn_facts
from extproc.receipt import Outcome, Reason, Receipt

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_everybodys_lines_are_json() -> None:
    script = """
import logging, structlog
from extproc.log import configure_logging
configure_logging("info")
structlog.get_logger().info("handle_stored", tokens=3)
structlog.get_logger().debug("not_shown")
logging.getLogger("some.library").warning("%s of %s", 1, "theirs")
logging.getLogger("some.library").info("not shown")
try:
    raise ValueError("odd")
except ValueError:
    logging.getLogger("some.library").exception("failed")
    structlog.get_logger().exception("stream_failed")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["handle_stored", "1 of theirs", "failed", "stream_failed"]
    assert [line["level"] for line in lines] == ["info", "warning", "error", "error"]
    assert all("timestamp" in line for line in lines)
    assert lines[1]["logger"] == "some.library"
    assert all("ValueError: odd" in line["exception"] for line in lines[2:])
    assert run.stderr == ""
    assert logging.getLevelNamesMapping()["DEBUG"] == 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes", TRACE),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_a_trace_is_known_without_tracing_it(value, expected) -> None:
    assert trace_id((("traceparent", value),)) == expected


def test_no_trace_is_no_trace() -> None:
    assert trace_id(()) is None


def test_a_turns_line() -> None:
    receipt = Receipt(Outcome.PARTIAL, Reason.HISTORY_DIFFERS, prompt_tokens=9, reused_tokens=8, conversation="ab12")
    receipt.decode_ms, receipt.ttft_ms, receipt.captured = 1.26, 30.04, "kept"
    exchange = SimpleNamespace(
        receipt=receipt,
        headers=(("x-request-id", "r1"), ("authorization", "Bearer secret"), ("traceparent", "nonsense")),
        status=200,
        upstream="10.0.0.7:8200",
    )
    assert turn_facts(exchange, None) == {
        "request_id": "r1",
        "status": 200,
        "upstream": "10.0.0.7:8200",
        "outcome": "partial",
        "reason": "history_differs",
        "reused": 8,
        "prompt": 9,
        "conversation": "ab12",
        "decode_ms": 1.3,
        "ttft_ms": 30.0,
        "captured": "kept",
    }
    assert turn_facts(exchange, TRACE)["trace_id"] == TRACE
