"""Structured logs: one JSON object per line on standard output, past-tense events with keys. Bodies and ids never."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

import structlog

from extproc.events import header
from extproc.log_sink import SINK

if TYPE_CHECKING:
    from extproc.events import Headers
    from extproc.http_exchange import HttpExchange

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", re.ASCII)


def configure_logging(level: str) -> None:
    """Set structlog up for this process; ``level`` is a standard level name in lower case."""
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*processors, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(SINK),  # type: ignore[arg-type] # a file as far as it is used
        cache_logger_on_first_use=True,
    )
    # What libraries have to say (an exporter of traces that finds no collector, say) takes the same form.
    handler = logging.StreamHandler(SINK)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*processors, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def trace_id(headers: Headers) -> str | None:
    """Return the trace a request says it belongs to (W3C ``traceparent``), in hexadecimal."""
    found = _TRACEPARENT.fullmatch(header(headers, "traceparent") or "")
    return None if found is None else found[1]


def turn_facts(exchange: HttpExchange, traced_as: str | None) -> dict[str, Any]:
    """Return what is logged of a turn: ids to join it by, what was done for it, how long it took. Absent: not so."""
    receipt = exchange.receipt
    facts = {
        "request_id": header(exchange.headers, "x-request-id"),
        "trace_id": traced_as or trace_id(exchange.headers),
        "status": exchange.status,
        "upstream": exchange.upstream,
        **receipt.metadata(),
        "decode_ms": receipt.decode_ms and round(receipt.decode_ms, 1),
        "ttft_ms": receipt.ttft_ms and round(receipt.ttft_ms, 1),
        "captured": receipt.captured,
        "abandoned": receipt.abandoned,
    }
    return {key: value for key, value in facts.items() if value is not None}
