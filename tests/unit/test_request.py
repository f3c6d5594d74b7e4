"""Reading a client's body: what is refused, what is taken out, and that nothing else changes by a byte."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from strategies import Pairs, json_objects, json_texts, keys, objects_of, pairs, spelled

from extproc import splice
from extproc.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint
from extproc.errors import ClientError
from extproc.request import FORBIDDEN_FIELDS, ApiRequest, has_non_text_content, is_true, parse_request

FORBIDDEN = sorted(FORBIDDEN_FIELDS)

forbidden_names = spelled(st.sampled_from(FORBIDDEN))
extra_arguments = objects_of(st.tuples(forbidden_names, json_texts), st.tuples(spelled(keys), json_texts))
bodies = objects_of(
    st.tuples(forbidden_names, json_texts),
    st.tuples(spelled(st.just("vllm_xargs")), extra_arguments),
    st.tuples(spelled(keys), json_texts),
)
"""Requests whose members are often forbidden ones, or extra arguments that hold them, each perhaps twice."""


def without_forbidden(members: Pairs) -> tuple[Pairs, int]:
    """What is left of a body's members, and how many were taken out."""
    left, removed = Pairs(), 0
    for key, value in members:
        if key in FORBIDDEN_FIELDS:
            removed += 1
        elif key == "vllm_xargs" and isinstance(value, Pairs):
            inner = Pairs(pair for pair in value if pair[0] not in FORBIDDEN_FIELDS)
            removed += len(value) - len(inner)
            left.append((key, inner))
        else:
            left.append((key, value))
    return left, removed


def is_made_by_deleting(shorter: bytes, longer: bytes) -> bool:
    rest = iter(longer)
    return all(byte in rest for byte in shorter)


@given(bodies, st.sampled_from(ENDPOINTS))
@example('{"vllm_xargs":{"kv_transfer_params":"x"},"vllm_xargs":{"a":1}}', CHAT)
@example('{"vllm_xargs":{"a":1.0},"vllm_xargs":{"n":18446744073709551616,"ec_transfer_params":1,"z":1}}', CHAT)
def test_hazard_10_forbidden_fields_go_and_every_other_byte_stays(text: str, endpoint: Endpoint) -> None:
    body = text.encode()
    request = parse_request(endpoint, body)
    left, removed = without_forbidden(pairs(body))
    assert pairs(request.raw) == left
    assert request.forbidden_fields_removed == removed
    assert is_made_by_deleting(request.raw, body)
    assert request.endpoint is endpoint
    if not removed:
        assert request.raw == body


@given(bodies)
def test_hazard_10_no_forbidden_field_counts_for_a_parser_that_keeps_the_last_of_duplicates(text: str) -> None:
    """That is Python's ``json``, which vLLM reads requests with."""
    seen = json.loads(parse_request(CHAT, text.encode()).raw)
    assert FORBIDDEN_FIELDS.isdisjoint(seen)
    assert not isinstance(seen.get("vllm_xargs"), dict) or FORBIDDEN_FIELDS.isdisjoint(seen["vllm_xargs"])


@given(bodies)
def test_the_fields_are_the_raw_text_parsed(text: str) -> None:
    request = parse_request(CHAT, text.encode())
    assert request.fields == orjson.loads(request.raw)


@given(json_objects)
def test_hazard_47_a_body_without_forbidden_fields_is_not_touched(text: str) -> None:
    names = {key for key, _ in pairs(text)}
    if names.isdisjoint({*FORBIDDEN, "vllm_xargs"}):
        assert parse_request(COMPLETIONS, text.encode()).raw == text.encode()


@pytest.mark.parametrize("name", ["priority", "cache_salt", "vllm_xargs", "session_id", "mm_processor_kwargs", "x_new"])
def test_hazard_47_unknown_fields_keep_their_spelling(name: str) -> None:
    body = f'{{ "{name}" : {{"a":1.50, "b":[ ]}} ,"kv_transfer_params":{{}}}}'.encode()
    assert parse_request(CHAT, body).raw == f'{{ "{name}" : {{"a":1.50, "b":[ ]}} }}'.encode()[:-2] + b"}"


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize(
    "body",
    [
        '{{"{0}":{{"do_remote_prefill":true}}}}',
        '{{"{0}":null}}',
        '{{"{0}":1,"{0}":2}}',
        '{{"{1}":1}}',
        '{{"{0}":1,"{1}":[{{}}]}}',
        '{{"vllm_xargs":{{"{0}":"x"}}}}',
        '{{"vllm_xargs":{{"{1}":"x"}}}}',
        '{{"vllm_xargs":{{"{0}":1}},"vllm_xargs":{{"{1}":2}}}}',
        '{{"vllm_xargs":{{"{0}":1}},"vllm_xargs":null}}',
        '{{"{2}":{{"{0}":1}}}}',
    ],
)
def test_hazard_10_no_spelling_of_a_forbidden_field_gets_through(name: str, body: str) -> None:
    escaped = "".join(f"\\u{ord(character):04x}" for character in name)
    request = parse_request(CHAT, body.format(name, escaped, "vllm_\\u0078args").encode())
    assert name.encode() not in request.raw
    assert escaped.encode() not in request.raw
    assert request.forbidden_fields_removed == body.count("{0}") + body.count("{1}")


def test_hazard_10_the_name_of_a_forbidden_field_inside_a_text_is_left_alone() -> None:
    body = b'{"messages":[{"content":"\\"kv_transfer_params\\": {\\"a\\": 1}","kv_transfer_params":1}]}'
    assert parse_request(CHAT, body) == ApiRequest(CHAT, body, json.loads(body), 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"1",
        b'"text"',
        b"{",
        b'{"a":1,}',
        b'{"a":1}{}',
        b"{'a':1}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":01}',
        b'{"a":"\x01"}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32"),
        b"\x00{}",
        b"{}\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_hazard_10_what_cannot_be_read_is_refused_with_400(body: bytes) -> None:
    """What kvloop cannot read it cannot clear; vLLM's parser would accept some of these."""
    with pytest.raises(ClientError) as refusal:
        parse_request(CHAT, body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")
    assert json.loads(refusal.value.body)["error"]["type"] == "invalid_request_error"


@given(st.binary(max_size=30) | json_texts.map(str.encode))
def test_any_bytes_are_a_request_or_a_client_error(body: bytes) -> None:
    try:
        request = parse_request(CHAT, body)
    except ClientError as error:
        assert error.status == 400  # noqa: PT017 - either way something is asserted
    else:
        assert isinstance(json.loads(body), dict)
        assert request.endpoint is CHAT


@pytest.mark.parametrize(("body", "model"), [(b'{"model":"m"}', "m"), (b"{}", ""), (b'{"model":7}', "")])
def test_the_model_is_the_one_named(body: bytes, model: str) -> None:
    assert parse_request(CHAT, body).model == model


@given(
    st.sampled_from([True, False, 0, 1, 1.0, 0.0, 2, -1, None, [], {}])
    | st.sampled_from(["1", "on", "t", "true", "y", "yes", "0", "off", "f", "false", "n", "no"]).map(str.swapcase)
    | st.sampled_from(["True", "ON", " true", "", "2", "yess"])
)
def test_a_value_is_true_where_vllm_takes_it_for_true(value: Any) -> None:
    try:
        expected = TypeAdapter(bool).validate_python(value)
    except ValidationError:
        expected = False
    assert is_true(value) == expected


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("1", True), ('"yes"', True), ("false", False)])
def test_a_client_that_asks_for_token_ids_in_any_spelling_wants_them(value: str, wanted: bool) -> None:
    assert parse_request(CHAT, f'{{"return_token_ids":{value}}}'.encode()).wants_token_ids is wanted


def test_a_client_that_says_nothing_of_token_ids_does_not_want_them() -> None:
    assert parse_request(CHAT, b"{}").wants_token_ids is False


def test_a_prompt_of_token_ids_is_known_without_a_worker() -> None:
    assert parse_request(COMPLETIONS, b'{"prompt":[0,1,4294967295]}').token_id_prompt == [0, 1, 4294967295]


@pytest.mark.parametrize(
    "prompt",
    [
        b'"text"',
        b"[]",
        b"[[1,2]]",
        b'["text"]',
        b"[1,true]",
        b"[1.0]",
        b"[-1]",
        b"[4294967296]",
        b"[18446744073709551616]",
        b"null",
        b'[1],"truncate_prompt_tokens":1',
    ],
)
def test_any_other_prompt_has_to_be_rendered(prompt: bytes) -> None:
    assert parse_request(COMPLETIONS, b'{"prompt":' + prompt + b"}").token_id_prompt is None


def test_a_chat_has_no_prompt_of_token_ids() -> None:
    assert parse_request(CHAT, b'{"prompt":[1,2]}').token_id_prompt is None


@pytest.mark.parametrize(
    "content",
    [
        "text",
        None,
        [],
        ["text"],
        [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
        [{"type": "thinking", "thinking": "a"}, {"type": "input_text"}, {"type": "output_text"}],
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "uuid": None}],
        {"type": "image_url"},
        5,
    ],
)
def test_text_is_known_as_text(content: Any) -> None:
    assert has_non_text_content({"messages": [{"role": "user", "content": content}]}) is False


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a"}},
        {"type": "input_audio"},
        {"type": "x_new"},
        {"text": "no type"},
        {"type": None},
        {"type": 5},
        {"type": []},
        {"type": {}},
        {"type": ["text"]},
        {"type": "text", "text": "a", "uuid": "u", "image_url": "b"},
        {"type": "text", "text": "a", "uuid": ""},
        {"type": "text", "text": "a", "video_url": "b"},
    ],
)
def test_anything_that_may_not_be_text_is_non_text(part: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text"}, part]}]
    assert has_non_text_content({"messages": messages}) is True


@pytest.mark.parametrize("fields", [{}, {"messages": None}, {"messages": "a"}, {"messages": ["a", 5, None, []]}])
def test_a_chat_that_no_worker_would_accept_holds_no_media(fields: dict[str, Any]) -> None:
    assert has_non_text_content(fields) is False


@given(json_objects)
def test_any_json_is_judged_without_an_exception(text: str) -> None:
    part = json.loads(text)
    request = parse_request(CHAT, json.dumps({"messages": [{"content": [part]}], "prompt": part}).encode())
    assert has_non_text_content(request.fields) in (True, False)
    assert request.token_id_prompt is None


def test_clearing_copies_the_body_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for each of thousands of forbidden fields would hold up every other client."""
    edited: list[int] = []
    real = splice.edit
    monkeypatch.setattr(splice, "edit", lambda data, *args, **kw: edited.append(len(data)) or real(data, *args, **kw))
    body = b'{"messages":[]' + b',"vllm_xargs":{"kv_transfer_params":1}' * 500 + b"}"
    assert parse_request(CHAT, body).forbidden_fields_removed == 500
    assert sum(edited) < 5 * len(body)


def test_a_body_of_countless_members_is_refused() -> None:
    """Each costs memory and time on each leg, in front of everybody else."""
    with pytest.raises(ClientError) as refused:
        parse_request(CHAT, b'{"messages":[]' + b',"a":1' * 10_000 + b"}")
    assert (refused.value.status, refused.value.code) == (400, "too_many_members")


def test_colons_in_text_are_no_members() -> None:
    text = b'{"messages":[{"role":"user","content":"' + b":" * 20_000 + b'"}]}'
    assert parse_request(CHAT, text).raw == text
