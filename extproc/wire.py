"""Translate between Envoy's protobuf messages and ``events``. The only module that knows the ext_proc wire format.

Messages come from xds-protos (upb): parsing takes a quarter of a microsecond, so it can stand on the per-chunk path. Its
``request_drain`` has the number that newer Envoys use for something else; it is never set here.

Source: envoy/service/ext_proc/v3/external_processor.proto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from extproc import headers as names
from extproc.errors import EnvoyProtocolError
from extproc.events import (
    Answer,
    Ended,
    Event,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
    Headers,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ATTRIBUTES_KEY: Final = "envoy.filters.http.ext_proc"
"""Envoy files attributes under this key whatever the filter's own name."""

MAX_STREAMED_BODY_BYTES: Final = 62_000
"""Some data planes cap a message at 64 KiB; Envoy's proto advises as much."""

_UNCHANGED_CHUNK: Final = ProcessingResponse(response_body={"response": {}}).SerializeToString()
_UNCHANGED_RESPONSE_TRAILERS: Final = ProcessingResponse(response_trailers={}).SerializeToString()
_STOP_WATCHING: Final = ProcessingMode(
    # Body modes are taken literally: leaving the request's out would switch it off.
    request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED,
    request_trailer_mode=ProcessingMode.SEND,
    response_body_mode=ProcessingMode.NONE,
    response_trailer_mode=ProcessingMode.SKIP,
)


def read(message: bytes, at: float) -> Event:
    """Parse one ``ProcessingRequest``; raises ``EnvoyProtocolError`` for kinds kvloop never asked for."""
    request = ProcessingRequest.FromString(message)
    match request.WhichOneof("request"):
        case "response_body":
            body = request.response_body
            return ResponseBody(body.body, body.end_of_stream, at)
        case "request_headers":
            return RequestHeaders(_headers(request.request_headers), request.request_headers.end_of_stream, at)
        case "request_body":
            return RequestBody(request.request_body.body, request.request_body.end_of_stream, at)
        case "request_trailers":
            return RequestTrailers(at)
        case "response_headers":
            headers = request.response_headers
            return ResponseHeaders(_headers(headers), headers.end_of_stream, at, _upstream_address(request))
        case "response_trailers":
            return ResponseTrailers(at)
        case other:
            raise EnvoyProtocolError(f"unexpected message kind {other}")


def ended(at: float) -> Ended:
    """Return the event of a closed stream."""
    return Ended(at)


def write(answer: Answer) -> Iterator[bytes]:
    """Serialise one answer as the ``ProcessingResponse`` messages it takes, in order."""
    match answer:
        case ForwardChunk(data=None, metadata=metadata) if not metadata:
            yield _UNCHANGED_CHUNK
        case ForwardChunk():
            yield _chunk(answer).SerializeToString()
        case ForwardRequest():
            yield from _request(answer)
        case ForwardResponseHeaders():
            yield _response_headers(answer).SerializeToString()
        case Reply():
            yield _immediate(answer).SerializeToString()
        case ForwardTrailers():
            yield _UNCHANGED_RESPONSE_TRAILERS


def _request(answer: ForwardRequest) -> Iterator[bytes]:
    response = ProcessingResponse()
    common = response.request_headers.response
    _mutate(common.header_mutation, answer.set_headers, answer.remove_headers)
    yield response.SerializeToString()
    if answer.body is None:
        return
    pieces = range(0, len(answer.body), MAX_STREAMED_BODY_BYTES) or range(1)
    for start in pieces:
        streamed = ProcessingResponse()
        piece = streamed.request_body.response.body_mutation.streamed_response
        piece.body = answer.body[start : start + MAX_STREAMED_BODY_BYTES]
        # After trailers the trailers end the request; an end_of_stream before them would hang it.
        piece.end_of_stream = start == pieces[-1] and not answer.had_trailers
        yield streamed.SerializeToString()
    if answer.had_trailers:
        yield ProcessingResponse(request_trailers={}).SerializeToString()


def _response_headers(answer: ForwardResponseHeaders) -> ProcessingResponse:
    response = ProcessingResponse()
    common = response.response_headers.response
    _mutate(common.header_mutation, answer.set_headers, answer.remove_headers)
    if not answer.watch:
        response.mode_override.CopyFrom(_STOP_WATCHING)
    _set_metadata(response, answer.metadata)
    return response


def _chunk(answer: ForwardChunk) -> ProcessingResponse:
    response = ProcessingResponse()
    common = response.response_body.response
    # Reading a part does not set it, and Envoy ends the request for an answer to nothing.
    common.SetInParent()
    if answer.data == b"":
        common.body_mutation.clear_body = True
    elif answer.data is not None:
        common.body_mutation.body = answer.data
    _set_metadata(response, answer.metadata)
    return response


def _immediate(answer: Reply) -> ProcessingResponse:
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = answer.status
    immediate.body = answer.body
    immediate.details = "kvloop"
    _mutate(immediate.headers, answer.headers, ())
    # Tells Envoy's local reply formatting that this body is already what the client shall get.
    _set_metadata(response, {**answer.metadata, names.VERBATIM: True})
    return response


def _mutate(mutation: Any, set_headers: Headers, remove_headers: tuple[str, ...]) -> None:
    mutation.set_headers.extend(
        HeaderValueOption(
            # raw_value only: Envoy refuses a header that has both.
            header=HeaderValue(key=name, raw_value=value.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in set_headers
    )
    mutation.remove_headers.extend(remove_headers)


def _set_metadata(response: ProcessingResponse, metadata: Mapping[str, Any]) -> None:
    if metadata:
        response.dynamic_metadata.update({names.METADATA_NAMESPACE: dict(metadata)})


def _headers(message: Any) -> Headers:
    return tuple((header.key, _text(header.raw_value) or header.value) for header in message.headers.headers)


def _text(raw: bytes) -> str:
    """Read a header value; any byte string is one, UTF-8 most often."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _upstream_address(request: Any) -> str | None:
    attributes = request.attributes.get(_ATTRIBUTES_KEY)
    if attributes is None or "upstream.address" not in attributes.fields:
        return None
    return str(attributes.fields["upstream.address"].string_value) or None
