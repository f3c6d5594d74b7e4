"""What each leg says to its worker: the prefill leg makes one token, the decode leg is the client's own request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Pairs, json_objects, json_texts, keys, objects_of, pairs, spelled

from extproc import legs
from extproc.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint
from extproc.handle import COLD_PREFILL, read_publication
from extproc.legs import PREFILL_FIELDS, Prefilled
from extproc.receipt import Reason
from extproc.request import FORBIDDEN_FIELDS, ApiRequest, parse_request

RECORDINGS = Path(__file__).parent.parent / "recordings" / "prefill"
PARAMS = b'{"do_remote_prefill":true, "x_new":1.50}'
IDS = b"[1,2,3]"


def request(body: str | bytes | dict[str, Any], endpoint: Endpoint = CHAT) -> ApiRequest:
    text = json.dumps(body) if isinstance(body, dict) else body
    return parse_request(endpoint, text.encode() if isinstance(text, str) else text)


bodies = objects_of(
    st.tuples(spelled(st.sampled_from(sorted(PREFILL_FIELDS))), json_texts),
    st.tuples(spelled(st.sampled_from([*sorted(FORBIDDEN_FIELDS), "prompt", "messages", "suffix"])), json_texts),
    st.tuples(spelled(keys), json_texts),
)
endpoints = st.sampled_from(ENDPOINTS)
ids_or_none = st.sampled_from([None, IDS])


def expected_leg(raw: bytes, endpoint: Endpoint, ids: bytes | None, drop: set[str], add: dict[str, str]) -> Pairs:
    """The client's members without the dropped ones, then ours."""
    params = pairs(PARAMS)
    own = Pairs((name, pairs(value)) for name, value in add.items())
    if ids is not None and endpoint is CHAT:
        params.append(("prompt_token_ids", pairs(ids)))
    elif ids is not None:
        drop |= {"prompt", "suffix"}
        own.append(("prompt", pairs(ids)))
    kept = [pair for pair in pairs(raw) if pair[0] not in drop]
    return Pairs([*kept, *own, ("kv_transfer_params", params)])


# --- the prefill leg ------------------------------------------------------------------------------------------------


@given(bodies, endpoints, ids_or_none)
def test_hazard_22_47_the_prefill_leg_drops_the_table_and_keeps_every_other_byte(
    text: str, endpoint: Endpoint, ids: bytes | None
) -> None:
    client = request(text, endpoint)
    body = legs.prefill_body(client, PARAMS, ids)
    set_fields = {name: rule.value.decode() for name, rule in PREFILL_FIELDS.items() if rule.value is not None}
    assert pairs(body) == expected_leg(client.raw, endpoint, ids, set(PREFILL_FIELDS), set_fields)


@given(bodies, endpoints, ids_or_none)
def test_hazard_21_the_prefill_leg_makes_exactly_one_token_whatever_the_client_sent(
    text: str, endpoint: Endpoint, ids: bytes | None
) -> None:
    body = legs.prefill_body(request(text, endpoint), PARAMS, ids)
    names = [name for name, _ in pairs(body)]
    seen = json.loads(body)
    assert (seen["max_tokens"], seen["stream"], seen["return_token_ids"]) == (1, False, True)
    assert {"max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search", "stop"}.isdisjoint(names)
    assert [names.count(name) for name in ("max_tokens", "stream", "kv_transfer_params")] == [1, 1, 1]


@pytest.mark.parametrize("name", sorted(PREFILL_FIELDS))
def test_hazard_22_each_field_of_the_table_has_a_reason_and_its_effect(name: str) -> None:
    rule = PREFILL_FIELDS[name]
    assert rule.why.strip()
    seen = json.loads(legs.prefill_body(request({name: "the client's"}), PARAMS, None))
    if rule.value is None:
        assert name not in seen
    else:
        assert seen[name] == json.loads(rule.value)


@pytest.mark.parametrize(
    "name",
    [
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "structured_outputs",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
    ],
)
def test_hazard_22_the_table_knows_every_field_that_shapes_output(name: str) -> None:
    assert name in PREFILL_FIELDS


SHAPES_THE_PROMPT = (
    "messages",
    "model",
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "truncation_side",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "cache_salt",
    "suffix",
    "response_format",  # vLLM's Kimi K3 and Cohere renderers write it into the prompt
)


@pytest.mark.parametrize("name", SHAPES_THE_PROMPT)
def test_hazard_22_a_field_that_shapes_the_prompt_reaches_p(name: str) -> None:
    """Else P computes another prompt than D answers. Source: vLLM 0.32 ``build_chat_params``, ``build_tok_params``."""
    body = legs.prefill_body(request(f'{{"{name}": {{"a":1.50}}}}'), PARAMS, None)
    assert f'"{name}": {{"a":1.50}}'.encode() in body


# --- the decode leg -------------------------------------------------------------------------------------------------


@given(text=bodies, endpoint=endpoints, ids=ids_or_none, ask=st.booleans())
def test_hazard_21_47_the_decode_leg_is_the_clients_request_and_what_makes_it_a_decode_leg(
    text: str, endpoint: Endpoint, ids: bytes | None, *, ask: bool
) -> None:
    client = request(text, endpoint)
    if "return_prompt_text" in client.fields:
        return
    body = legs.decode_body(client, PARAMS, ids, ask_token_ids=ask)
    drop, add = ({"return_token_ids"}, {"return_token_ids": "true"}) if ask else (set(), {})
    assert pairs(body) == expected_leg(client.raw, endpoint, ids, drop, add)


def test_hazard_21_what_the_client_left_out_stays_out() -> None:
    body = legs.decode_body(request('{"messages": []}'), PARAMS, None, ask_token_ids=False)
    assert body == b'{"messages": [],"kv_transfer_params":' + PARAMS + b"}"


@given(json_objects, endpoints)
def test_without_transfer_parameters_the_decode_leg_is_the_clients_request(text: str, endpoint: Endpoint) -> None:
    client = request(text, endpoint)
    assert legs.decode_body(client, None, IDS, ask_token_ids=True) is client.raw


def test_a_chats_prompt_ids_travel_in_the_transfer_parameters() -> None:
    body = json.loads(legs.decode_body(request({"messages": [{}]}), b"{}", IDS, ask_token_ids=False))
    assert body == {"messages": [{}], "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}


def test_a_completions_prompt_ids_are_its_prompt() -> None:
    body = json.loads(legs.decode_body(request({"prompt": "a"}, COMPLETIONS), b"{}", IDS, ask_token_ids=False))
    assert body == {"prompt": [1, 2, 3], "kv_transfer_params": {}}


def test_a_suffix_is_not_sent_beside_the_ids_it_is_part_of() -> None:
    """Source: vLLM 0.32 ``online_renderer.py``: "suffix requires text prompt input"."""
    client = request({"prompt": "a", "suffix": "b"}, COMPLETIONS)
    assert json.loads(legs.decode_body(client, b"{}", IDS, ask_token_ids=False))["prompt"] == [1, 2, 3]
    assert b"suffix" not in legs.decode_body(client, b"{}", IDS, ask_token_ids=False)
    assert b"suffix" not in legs.prefill_body(client, b"{}", IDS)
    assert b'"suffix": "b"' in legs.prefill_body(client, b"{}", None)


def test_hazard_49_a_client_that_wants_the_prompts_text_gets_it_from_a_d_that_renders_it() -> None:
    client = request({"messages": [{}], "return_prompt_text": True})
    assert b"prompt_token_ids" not in legs.decode_body(client, PARAMS, IDS, ask_token_ids=False)
    assert b"prompt_token_ids" in legs.prefill_body(client, PARAMS, IDS)


# --- which requests are split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": 2.0},
        {"n": "2"},
        {"n": " 2 "},
        {"n": 0},
        {"n": []},
        {"best_of": 3},
        {"use_beam_search": True},
        {"use_beam_search": "true"},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, "2"]},
        {"prompt": "a", "prompt_embeds": "AAAA"},
        {"prompt": [1, 2], "prompt_embeds": "AAAA"},
        {"prompt_embeds": ["AAAA", "BBBB"]},
    ],
)
def test_hazard_36_what_makes_several_sequences_goes_to_d_alone(fields: dict[str, Any]) -> None:
    """Each would read the one handle, and D frees the blocks at the first read."""
    assert legs.plan_decode_alone(request(fields, COMPLETIONS)) is Reason.SEVERAL_SEQUENCES


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"prompt_logprobs": 5}, {"echo": True}, {"echo": "yes"}, {"echo": 1}]
)
def test_hazard_46_a_question_about_the_prompt_itself_goes_to_d_alone(fields: dict[str, Any]) -> None:
    assert legs.plan_decode_alone(request(fields)) is Reason.PROMPT_LOGPROBS


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "best_of": 1, "use_beam_search": False, "echo": False, "prompt_logprobs": None},
        {"n": None, "n_new": 2, "echo": None, "use_beam_search": None},
        {"n": 1.0},
        {"prompt": []},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2]},
        {"prompt": "ab"},
        {"prompt_embeds": "AAAA"},
        {"logprobs": 5, "top_logprobs": 5},
    ],
)
def test_any_other_request_is_split(fields: dict[str, Any]) -> None:
    assert legs.plan_decode_alone(request(fields, COMPLETIONS)) is None


@given(json_objects, endpoints)
def test_any_request_is_planned_without_an_exception(text: str, endpoint: Endpoint) -> None:
    client = request(text, endpoint)
    assert legs.plan_decode_alone(client) in (None, Reason.SEVERAL_SEQUENCES, Reason.PROMPT_LOGPROBS)
    assert legs.is_text_only(client) in (True, False)


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (CHAT, {"messages": [{"content": "a"}]}, True),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, False),
        (COMPLETIONS, {"prompt": "a"}, True),
        (COMPLETIONS, {"prompt": [1]}, True),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": None}, True),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, False),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, False),
        (COMPLETIONS, {}, False),
    ],
)
def test_token_ids_prove_text_only(endpoint: Endpoint, fields: dict[str, Any], *, expected: bool) -> None:
    assert legs.is_text_only(request(fields, endpoint)) is expected


# --- rendering ------------------------------------------------------------------------------------------------------


def test_a_render_is_asked_with_the_clients_own_request() -> None:
    client = request('{"messages": [],"kv_transfer_params":{}, "tools": [ ]}')
    assert legs.render_body(client) == b'{"messages": [], "tools": [ ]}'


@pytest.mark.parametrize("name", ["render-chat", "render-completions"])
def test_a_recorded_render_is_read(name: str) -> None:
    body = (RECORDINGS / f"{name}.http-body").read_bytes()
    whole = json.loads(body)
    assert legs.read_rendered(body) == (whole[0] if isinstance(whole, list) else whole)["token_ids"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not JSON",
        b"null",
        b"[]",
        b"{}",
        b'{"token_ids":null}',
        b'{"token_ids":[]}',
        b'{"token_ids":[1,true]}',
        b'{"token_ids":[-1]}',
        b'{"token_ids":[4294967296]}',
        b'{"token_ids":[1.0]}',
        b'{"token_ids":"12"}',
        b'{"token_ids":[1],"features":{}}',
        b'[{"token_ids":[1]},{"token_ids":[2]}]',
        b'[[{"token_ids":[1]}]]',
        b'{"error":{"message":"403"}}',
    ],
)
def test_anything_but_one_text_prompt_is_no_render(body: bytes) -> None:
    assert legs.read_rendered(body) is None


def test_every_token_id_that_fits_32_bits_is_one() -> None:
    assert legs.read_rendered(b'{"token_ids":[0,4294967295],"features":null}') == [0, 2**32 - 1]


# --- P's answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat-cold", "chat-with-handle", "completions-cold", "completions-with-handle"])
def test_a_recorded_answer_of_p_is_read(name: str) -> None:
    body = (RECORDINGS / f"{name}.http-body").read_bytes()
    answer = json.loads(body)
    prefilled = legs.read_prefilled(body)
    assert prefilled is not None
    assert json.loads(prefilled.params) == answer["kv_transfer_params"]
    assert prefilled.params in body
    assert prefilled.prompt_ids == (answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids"))
    assert prefilled.prompt_ids
    assert prefilled.cached_tokens == answer["kv_transfer_params"].get("remote_prefill_cached_tokens")


@pytest.mark.parametrize("name", ["error-400", "error-404-model", "error-404-path", "models", "render-completions"])
def test_a_recorded_answer_without_kv_is_not(name: str) -> None:
    assert legs.read_prefilled((RECORDINGS / f"{name}.http-body").read_bytes()) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{"do_remote_prefill":false}}',
        b'{"kv_transfer_params":[true]}',
    ],
)
def test_an_answer_that_d_could_read_nothing_with_is_none(body: bytes) -> None:
    assert legs.read_prefilled(body) is None


@pytest.mark.parametrize(
    ("rest", "ids"),
    [
        (b"", None),
        (b',"prompt_token_ids":[1,2]', [1, 2]),
        (b',"choices":[{"prompt_token_ids":[3]}]', [3]),
        (b',"prompt_token_ids":null,"choices":[{"prompt_token_ids":[3]}]', [3]),
        (b',"prompt_token_ids":["1"]', None),
        (b',"choices":[]', None),
        (b',"choices":[7]', None),
        (b',"choices":{}', None),
    ],
)
def test_prompt_ids_stand_in_the_answer_or_its_first_choice(rest: bytes, ids: list[int] | None) -> None:
    params = b'{ "do_remote_prefill":true,"remote_prefill_cached_tokens":7, "t":12345.678901234 }'
    body = b'{"kv_transfer_params":{},"kv_transfer_params": ' + params + rest + b"}"
    assert legs.read_prefilled(body) == Prefilled(params, ids, 7)


@given(text=json_objects, with_kv=st.booleans())
def test_any_answer_of_p_is_read_or_none(text: str, *, with_kv: bool) -> None:
    inner = text.strip(" \t\r\n")[1:-1]
    answer = f'{{{inner}{"," if pairs(text) else ""}"kv_transfer_params":{PARAMS.decode()}}}' if with_kv else text
    prefilled = legs.read_prefilled(answer.encode())
    assert (prefilled is not None) == with_kv
    assert prefilled is None or prefilled.params == PARAMS
    assert legs.read_rendered(answer.encode()) is None


# --- the release ----------------------------------------------------------------------------------------------------

HANDLE = read_publication(
    b'{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1,2]],"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":5600,"remote_num_tokens":64,"t": 12345.678901234}'
).handle


def test_a_release_makes_p_read_nothing() -> None:
    body = json.loads(legs.release_body(HANDLE, "m"))
    assert body == {
        "prompt": [0],
        "max_tokens": 1,
        "stream": False,
        "model": "m",
        "kv_transfer_params": json.loads(HANDLE.raw) | {"remote_num_tokens": 0},
    }
    assert b'"t": 12345.678901234' in legs.release_body(HANDLE, "m")


def test_a_release_without_a_model_leaves_the_choice_to_the_worker() -> None:
    assert "model" not in json.loads(legs.release_body(HANDLE, ""))


def test_a_release_is_a_completion() -> None:
    assert legs.RELEASE_PATH == "/v1/completions"


def test_a_cold_prefill_carries_no_handle() -> None:
    body = json.loads(legs.prefill_body(request({"messages": []}), COLD_PREFILL, None))
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
