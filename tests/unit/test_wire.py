"""The ext_proc wire format: what is read from Envoy's messages, and what each answer looks like to Envoy."""

from __future__ import annotations

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from hypothesis import given
from hypothesis import strategies as st

from extproc import wire
from extproc.errors import EnvoyProtocolError
from extproc.events import (
    Answer,
    Ended,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)

AT = 12.5


def read(**fields):
    return wire.read(ProcessingRequest(**fields).SerializeToString(), AT)


def written(answer) -> list[ProcessingResponse]:
    return [ProcessingResponse.FromString(message) for message in wire.write(answer)]


def http_headers(*headers: HeaderValue, end_of_stream: bool = False) -> HttpHeaders:
    return HttpHeaders(headers=HeaderMap(headers=headers), end_of_stream=end_of_stream)


def test_hazard_27_header_values_are_read_from_raw_value_first() -> None:
    headers = (
        HeaderValue(key="a", raw_value=b"\xffx", value="no"),
        HeaderValue(key="b", value="v"),
        HeaderValue(key="c", raw_value="会話".encode()),
    )
    event = read(request_headers=http_headers(*headers, end_of_stream=True))
    assert event == RequestHeaders((("a", "\xffx"), ("b", "v"), ("c", "会話")), end_of_stream=True, at=AT)


def test_bodies_and_trailers_are_read() -> None:
    assert read(request_body=HttpBody(body=b"x", end_of_stream=True)) == RequestBody(b"x", end_of_stream=True, at=AT)
    assert read(response_body=HttpBody(body=b"y")) == ResponseBody(b"y", end_of_stream=False, at=AT)
    assert read(request_trailers=HttpTrailers()) == RequestTrailers(AT)
    assert read(response_trailers=HttpTrailers()) == ResponseTrailers(AT)
    assert wire.ended(AT) == Ended(AT)


@pytest.mark.parametrize(
    ("attributes", "address"),
    [
        ({"envoy.filters.http.ext_proc": {"upstream.address": "10.0.0.1:8200"}}, "10.0.0.1:8200"),
        ({"envoy.filters.http.ext_proc": {"response.code": 503}}, None),
        ({}, None),
    ],
)
def test_the_serving_worker_s_address_is_read_where_envoy_gives_it(attributes, address) -> None:
    request = ProcessingRequest(response_headers=http_headers(HeaderValue(key=":status", raw_value=b"200")))
    for name, fields in attributes.items():
        request.attributes[name].update(fields)
    event = wire.read(request.SerializeToString(), AT)
    assert event == ResponseHeaders(((":status", "200"),), end_of_stream=False, at=AT, upstream_address=address)


def test_an_empty_message_is_a_protocol_error() -> None:
    with pytest.raises(EnvoyProtocolError):
        read()


def test_an_unchanged_chunk_is_one_constant_message_without_mutation() -> None:
    (response,) = written(ForwardChunk())
    assert response.WhichOneof("response") == "response_body"
    assert not response.response_body.response.HasField("body_mutation")


METADATA = {"captured": "kept"}


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (ForwardRequest(None), ["request_headers"]),
        (ForwardRequest(b""), ["request_headers", "request_body"]),
        (ForwardRequest(b"", had_trailers=True), ["request_headers", "request_body", "request_trailers"]),
        (ForwardResponseHeaders(watch=False), ["response_headers"]),
        (ForwardResponseHeaders(watch=True), ["response_headers"]),
        (ForwardResponseHeaders(watch=True, metadata=METADATA), ["response_headers"]),
        (ForwardChunk(), ["response_body"]),
        (ForwardChunk(None, METADATA), ["response_body"]),
        (ForwardChunk(b""), ["response_body"]),
        (ForwardChunk(b"x", METADATA), ["response_body"]),
        (ForwardTrailers(), ["response_trailers"]),
        (Reply(400, b"", headers=()), ["immediate_response"]),
    ],
)
def test_hazard_31_every_answer_says_which_message_it_answers(answer: Answer, kinds: list[str]) -> None:
    assert [message.WhichOneof("response") for message in written(answer)] == kinds


def test_a_replaced_chunk_carries_its_bytes_and_an_emptied_one_is_cleared() -> None:
    (replaced,) = written(ForwardChunk(b"new", {"captured": "kept"}))
    assert replaced.response_body.response.body_mutation.body == b"new"
    assert replaced.dynamic_metadata["kvloop"]["captured"] == "kept"
    (emptied,) = written(ForwardChunk(b""))
    assert emptied.response_body.response.body_mutation.clear_body


def test_an_unchanged_chunk_with_metadata_changes_no_body() -> None:
    (response,) = written(ForwardChunk(None, {"captured": "kept"}))
    assert not response.response_body.response.HasField("body_mutation")
    assert response.dynamic_metadata["kvloop"]["captured"] == "kept"


def test_hazard_27_headers_are_written_as_raw_values_that_overwrite() -> None:
    headers, *_ = written(ForwardRequest(None, (("x-kvloop-conversation", "ab"),), ("accept-encoding",)))
    mutation = headers.request_headers.response.header_mutation
    (option,) = mutation.set_headers
    assert (option.header.key, option.header.raw_value, option.header.value) == ("x-kvloop-conversation", b"ab", "")
    assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert list(mutation.remove_headers) == ["accept-encoding"]


@given(size=st.integers(0, 3 * wire.MAX_STREAMED_BODY_BYTES + 1), trailers=st.booleans())
def test_a_request_body_goes_out_in_pieces_and_ends_exactly_once(size: int, trailers: bool) -> None:
    body = bytes(size)
    headers, *rest = written(ForwardRequest(body, had_trailers=trailers))
    assert headers.WhichOneof("response") == "request_headers"
    if trailers:
        assert rest.pop().WhichOneof("response") == "request_trailers"
    pieces = [message.request_body.response.body_mutation.streamed_response for message in rest]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= wire.MAX_STREAMED_BODY_BYTES for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [not trailers]


def test_a_request_without_body_is_answered_with_headers_alone() -> None:
    assert [message.WhichOneof("response") for message in written(ForwardRequest(None))] == ["request_headers"]


def test_an_unwatched_response_is_taken_off_the_stream_with_both_body_modes_said() -> None:
    (response,) = written(ForwardResponseHeaders(watch=False, metadata={"outcome": "cold"}))
    mode = response.mode_override
    assert mode.request_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
    assert mode.response_body_mode == ProcessingMode.NONE
    assert mode.response_trailer_mode == ProcessingMode.SKIP
    assert response.dynamic_metadata["kvloop"]["outcome"] == "cold"


def test_a_watched_response_keeps_the_configured_mode() -> None:
    (response,) = written(ForwardResponseHeaders(watch=True, set_headers=(("x-kvloop-receipt", "outcome=cold"),)))
    assert not response.HasField("mode_override")
    (option,) = response.response_headers.response.header_mutation.set_headers
    assert option.header.raw_value == b"outcome=cold"


def test_a_refusal_is_marked_verbatim_for_envoy_s_local_replies() -> None:
    (response,) = written(Reply(413, b'{"error":{}}', metadata={"outcome": "refused"}))
    immediate = response.immediate_response
    assert (immediate.status.code, immediate.body) == (413, b'{"error":{}}')
    assert immediate.headers.set_headers[0].header.raw_value == b"application/json"
    assert response.dynamic_metadata["kvloop"]["verbatim"] is True
    assert response.dynamic_metadata["kvloop"]["outcome"] == "refused"


def test_response_trailers_are_answered() -> None:
    assert written(ForwardTrailers())[0].WhichOneof("response") == "response_trailers"
