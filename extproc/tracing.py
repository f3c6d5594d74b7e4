"""OpenTelemetry traces: one span per turn, one below it for each leg. Off unless the standard ``OTEL_*`` variables ask.

Spans are made here, from what an exchange asks for and from its receipt; the exchange knows nothing of them. They carry
counts, outcomes and hashes, never a prompt, an answer or a conversation's name. They are exported by a thread of the SDK
from a bounded queue: a collector that is slow, full or gone costs spans, and nothing else.

OpenTelemetry is an extra; without it, and without those variables, this module imports nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from extproc import __version__
from extproc.endpoints import Dialect
from extproc.errors import ConfigError
from extproc.events import ForwardRequest, header
from extproc.receipt import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from extproc.events import Call, Headers, LegResult
    from extproc.http_exchange import HttpExchange

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTERS: Final = ("otlp", "console", "none")
_PROTOCOLS: Final = ("grpc", "http/protobuf")
_LAST_EXPORT_SECONDS: Final = 5.0
_LONGEST_TEXT: Final = 256
"""A model's name comes from the client."""

_OPERATIONS: Final = {Dialect.CHAT: "chat", Dialect.COMPLETIONS: "text_completion"}
_NANO: Final = 1_000_000_000


def start_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """Return what makes spans, None if the environment does not ask for any; raises ``ConfigError``.

    Asked for is what OpenTelemetry's specification says: ``OTEL_TRACES_EXPORTER`` (``otlp``, ``console``, ``none``), or an
    OTLP endpoint alone; ``OTEL_SDK_DISABLED=true`` wins. All other ``OTEL_*`` variables are read by the SDK itself.
    """
    asked_by = next((name for name in ("OTEL_TRACES_EXPORTER", *_ENDPOINTS) if environment.get(name)), None)
    if asked_by is None or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter not in _EXPORTERS:
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter} is not one of {', '.join(_EXPORTERS)}")
    if exporter == "none":
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environment[name] for name in names if environment.get(name)), _PROTOCOLS[0])
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not one of {', '.join(_PROTOCOLS)}")
    try:
        return Tracing(_provider(exporter, protocol, environment))
    except ImportError as error:
        raise ConfigError(f"{asked_by} asks for traces, but {_missing(error)}, or unset it") from None


def _missing(error: ImportError) -> str:
    """Say what is not there, and how to get it.

    xds-protos brings an older copy of OpenTelemetry's messages, to the same place: whichever is installed last is there.
    """
    if (error.name or "").startswith("opentelemetry.proto"):
        return (
            "xds-protos' older copy of OpenTelemetry's messages is in the way:"
            " pip install --force-reinstall --no-deps opentelemetry-proto"
        )
    return "OpenTelemetry is not installed: pip install '.[otel]' in a checkout"


def _provider(exporter: str, protocol: str, environment: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra: see the module's docstring
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "kvloop"}
    # The SDK's own resource attributes (OTEL_RESOURCE_ATTRIBUTES) win over these.
    resource = Resource.create({"service.version": __version__, **named})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter, protocol)))
    return provider


def _exporter(exporter: str, protocol: str) -> SpanExporter:
    if exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

        return ConsoleSpanExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # type: ignore[assignment] # noqa: PLC0415
    return OTLPSpanExporter()


class Tracing:
    """Makes the spans of one process. Belongs to its event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace  # noqa: PLC0415

        self._provider = provider
        self.api = trace
        self.tracer = provider.get_tracer("kvloop", __version__)
        self._propagator = propagate.get_global_textmap()
        self._fields = self._propagator.fields

    def parent(self, headers: Headers, metadata: Callable[[str], str]) -> Context:
        """Read the trace a request belongs to: from ``traceparent``, or what OTEL_PROPAGATORS names.

        If Envoy traces, the stream's own metadata names Envoy's span, and that comes before the client's.
        """
        carrier = {name: value for name, value in headers if name in self._fields}
        return self._propagator.extract(carrier | {name: value for name in self._fields if (value := metadata(name))})

    def joined(self, headers: Headers, span: Span) -> Headers:
        """Return headers that make whoever receives them a child of ``span``."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.api.set_span_in_context(span))
        return (*((name, value) for name, value in headers if name not in carrier), *carrier.items())

    async def stop(self) -> None:
        """Export what is left, for a few seconds at most."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # A collector that does not answer must not keep the process: hence a thread that dies with it.
        threading.Thread(target=shut_down, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_EXPORT_SECONDS):
                await done.wait()


class TurnTrace:
    """The spans of one turn."""

    def __init__(self, tracing: Tracing, exchange: HttpExchange, metadata: Callable[[str], str]) -> None:
        self._tracing = tracing
        self._exchange = exchange
        self._forwarded: Span | None = None
        request = exchange.request
        name = "turn" if request is None else f"{_OPERATIONS[request.endpoint.dialect]} {request.model}".strip()
        self._span = tracing.tracer.start_span(
            name[:_LONGEST_TEXT],
            tracing.parent(exchange.headers, metadata),
            kind=tracing.api.SpanKind.SERVER,
            attributes=_asked(exchange),
            start_time=_wall_clock(exchange.arrived_at),
        )
        self._below = tracing.api.set_span_in_context(self._span)

    @property
    def trace_id(self) -> str:
        """The trace this turn belongs to, in hexadecimal."""
        return f"{self._span.get_span_context().trace_id:032x}"

    async def call(self, call: Call, perform: Callable[[Call], Awaitable[LegResult]]) -> LegResult:
        """Perform a leg below a span of its own."""
        span = self._leg_span(str(call.leg), call.path, call.headers)
        try:
            result = await perform(replace(call, headers=self._tracing.joined(call.headers, span)))
            self._note_answer(span, result.status, result.upstream or None, result.error)
        finally:
            span.end()
        return result

    def forward(self, answer: ForwardRequest) -> ForwardRequest:
        """Begin the leg that goes on through Envoy, and make its worker's spans part of it."""
        self._forwarded = span = self._leg_span(str(self._exchange.forwards_to), "", self._exchange.headers)
        return replace(answer, set_headers=self._tracing.joined(answer.set_headers, span))

    def finish(self, error: str = "") -> None:
        """End what is open, with what the receipt says; ``error`` is what broke the stream."""
        exchange, receipt = self._exchange, self._exchange.receipt
        if self._forwarded is not None:
            if receipt.ttft_ms is not None:
                first = exchange.arrived_at + receipt.ttft_ms / 1000
                self._forwarded.add_event("first_token", timestamp=_wall_clock(first))
            self._note_answer(self._forwarded, exchange.status, exchange.upstream, error)
            self._forwarded.end()
        self._span.set_attributes({key: value for key, value in _became(exchange).items() if value is not None})
        if error or receipt.outcome is Outcome.REFUSED:
            self._span.set_attribute("error.type", error or str(receipt.reason))
        if error or (exchange.status or 0) >= 500:  # noqa: PLR2004 - a client's own errors are none of the server's
            self._span.set_status(self._tracing.api.StatusCode.ERROR)
        self._span.end()

    def _leg_span(self, name: str, path: str, headers: Headers) -> Span:
        attributes = {"http.request.method": "POST", "kvloop.request_id": header(headers, "x-request-id") or ""}
        if path:
            attributes["url.path"] = path
        return self._tracing.tracer.start_span(
            name, self._below, kind=self._tracing.api.SpanKind.CLIENT, attributes=attributes
        )

    def _note_answer(self, span: Span, status: int | None, upstream: str | None, error: str) -> None:
        if status:
            span.set_attribute("http.response.status_code", status)
        host, _, port = (upstream or "").rpartition(":")
        if port.isdecimal():
            span.set_attributes({"server.address": host.strip("[]"), "server.port": int(port)})
        if error or (status or 0) >= 400:  # noqa: PLR2004 - HTTP
            span.set_attribute("error.type", error or str(status))
            span.set_status(self._tracing.api.StatusCode.ERROR)


def _asked(exchange: HttpExchange) -> dict[str, Any]:
    """Return what is known when a turn begins, by the names of OpenTelemetry's GenAI conventions."""
    attributes: dict[str, Any] = {"kvloop.request_id": header(exchange.headers, "x-request-id") or ""}
    request = exchange.request
    if request is not None:
        stream, limit = request.fields.get("stream"), request.fields.get("max_tokens")
        attributes |= {
            "gen_ai.operation.name": _OPERATIONS[request.endpoint.dialect],
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": request.model[:_LONGEST_TEXT],
            "http.request.method": "POST",
            "http.route": request.endpoint.path,
        }
        if isinstance(stream, bool):
            attributes["gen_ai.request.stream"] = stream
        if type(limit) is int and abs(limit) < 1 << 63:
            attributes["gen_ai.request.max_tokens"] = limit
    return attributes


def _became(exchange: HttpExchange) -> dict[str, Any]:
    """Return what is known when it has ended; None stands for what does not apply."""
    receipt = exchange.receipt
    return {
        "http.response.status_code": exchange.status,
        # The hash: convention wants an id by which turns can be joined, not the client's own words for it.
        "gen_ai.conversation.id": receipt.conversation,
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": receipt.reused_tokens
        if receipt.cached_tokens is None
        else receipt.cached_tokens,
        "gen_ai.response.time_to_first_chunk": None if receipt.ttft_ms is None else receipt.ttft_ms / 1000,
        "kvloop.outcome": str(receipt.outcome),
        "kvloop.reason": receipt.reason and str(receipt.reason),
        "kvloop.reused_tokens": receipt.reused_tokens,
        "kvloop.held_tokens": receipt.held_tokens,
        "kvloop.captured": receipt.captured,
        "kvloop.abandoned": receipt.abandoned and str(receipt.abandoned),
    }


def _wall_clock(monotonic_seconds: float) -> int:
    """Return the time of day, in nanoseconds, of a moment on the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_seconds) * _NANO)
