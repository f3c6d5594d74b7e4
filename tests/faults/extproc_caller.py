"""Envoy's side of ext_proc, by hand: open a stream, send its messages up to one of them, and go away."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from bench.site import HOST

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ANSWER_SECONDS = 20.0

KINDS = (
    *("nothing", "request headers", "half a request body", "a request body in prefill", "a request body"),
    *("response headers", "a response chunk", "the response's end"),
)
"""The last message before the stream is cancelled. ``in prefill``: before its answer."""


class Caller:
    """One channel to an ext_proc replica."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"{HOST}:{port}")
        self._process = self._channel.stream_stream(
            METHOD, request_serializer=ProcessingRequest.SerializeToString, response_deserializer=lambda raw: raw
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def cancelled_after(self, kind: str, conversation: str, text: str) -> None:
        """Open a stream, send all up to ``kind``, cancel."""
        sent: queue.SimpleQueue[ProcessingRequest | None] = queue.SimpleQueue()
        call = self._process(iter(sent.get, None), timeout=ANSWER_SECONDS)
        try:
            for name, message, answers in _messages(conversation, text):
                if kind == "nothing":
                    break
                sent.put(message)
                in_prefill = name == "a request body" and kind == "a request body in prefill"
                for _ in range(0 if in_prefill else answers):
                    next(call)
                if name == kind or in_prefill:
                    break
        finally:
            call.cancel()
            sent.put(None)


def _messages(conversation: str, text: str) -> Iterator[tuple[str, ProcessingRequest, int]]:
    """Yield the messages of one exchange, and how many answers each has."""
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": text}], "stream": True}).encode()
    opening = {":method": "POST", ":path": "/v1/chat/completions", "x-conversation-id": conversation}
    yield "request headers", _headers("request_headers", opening), 0
    yield "half a request body", ProcessingRequest(request_body={"body": body[:50]}), 0
    yield "a request body", ProcessingRequest(request_body={"body": body[50:], "end_of_stream": True}), 2
    response = {":status": "200", "content-type": "text/event-stream"}
    yield "response headers", _headers("response_headers", response), 1
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    yield "a response chunk", ProcessingRequest(response_body={"body": chunk}), 1
    yield "the response's end", ProcessingRequest(response_body={"body": b"", "end_of_stream": True}), 1


def _headers(which: str, values: dict[str, str]) -> ProcessingRequest:
    headers = HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()])
    fields: dict[str, Any] = {which: {"headers": headers}}
    return ProcessingRequest(**fields)
