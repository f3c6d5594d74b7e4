"""A stand-in for an InferencePool's endpoint picker: full duplex both ways, changes nothing, notes what it saw."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse


class EndpointPicker:
    """Use as a context manager. ``requests`` and ``responses`` are the bodies that passed."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.responses: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(16))
        handler = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(
            "envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _process(self, messages: Any, _: Any) -> Any:
        bodies: dict[str, bytes] = {"request_body": b"", "response_body": b""}
        for message in messages:
            kind = message.WhichOneof("request")
            answer = ProcessingResponse()
            if kind in bodies:
                body = getattr(message, kind)
                bodies[kind] += body.body
                piece = getattr(answer, kind).response.body_mutation.streamed_response
                piece.body, piece.end_of_stream = body.body, body.end_of_stream
                if body.end_of_stream:
                    (self.requests if kind == "request_body" else self.responses).append(bodies[kind])
            else:
                getattr(answer, kind).SetInParent()
            yield answer
