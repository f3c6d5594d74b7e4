"""A collector of OpenTelemetry traces that speaks OTLP over gRPC and over HTTP, as the real ones do, and keeps all it gets."""

from __future__ import annotations

import gzip
import http.server
import threading
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class ReceivedSpan:
    """A span as it arrived. Ids are hexadecimal, times nanoseconds of the day, ``parent`` is empty for a root."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    events: dict[str, int]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Use as a context manager. ``grpc_endpoint`` and ``http_endpoint`` are what OTEL_EXPORTER_OTLP_ENDPOINT wants."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """The requests, to look for what must not be in them."""

    def __enter__(self) -> Self:
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(self), self._grpc)
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(None)
        self._http.shutdown()
        self._http.server_close()

    def take(self, request: Any) -> None:
        """Keep the spans of one export."""
        self.raw.append(request.SerializeToString())
        for resource_spans in request.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans += [_read(span, resource) for span in scope.spans]


def _read(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=span.status.code,
        attributes=_values(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, _: Any) -> Any:  # noqa: N802 - the name of the RPC
        self._collector.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def _handler(collector: Collector) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
