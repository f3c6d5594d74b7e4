"""The role decode, branch by branch: what is asked of D, what the orchestrator gets to see, and what is kept."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from world import BLOCK_SIZE, FOR_DECODE, Seen, World, handle_params, receipt_of, sse

from extproc.events import ForwardRequest, header
from extproc.handle import DECODE_ALONE
from extproc.intercept_decode import DecodeExchange
from extproc.prompt_mark import put_mark
from extproc.settings import GatewaySettings

PROMPT = list(range(100))
HELD = [*PROMPT, 500, 501]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
FROM_P = orjson.dumps(FOR_DECODE)


def body(params: bytes, **fields: Any) -> bytes:
    return orjson.dumps(CHAT | fields)[:-1] + b',"kv_transfer_params":' + params + b"}"


MARKED = put_mark(FROM_P, PROMPT, "outcome=reused, reused=64")


def final(**changes: Any) -> dict[str, Any]:
    """D's last chunk, with a handle that carries its own digest."""
    params = handle_params(len(HELD), digest_of=HELD, prompt=PROMPT) | changes
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": params}


@pytest.fixture
def world() -> World:
    return World(role=DecodeExchange, settings=GatewaySettings(decode_block_size_tokens=BLOCK_SIZE))


def ask(world: World, sent: bytes, *messages: Any, **headers: str) -> Seen:
    headers.setdefault("x_conversation_id", "c1")
    return world.run([*world.request(sent, **headers), *world.response(sse(*messages))])


# --- the request ------------------------------------------------------------------------------------------------------


def test_the_request_goes_on_as_it_came_but_for_the_mark_and_the_question_for_ids(world: World) -> None:
    seen = ask(world, body(MARKED, x_new=1), final())
    assert seen.decode == CHAT | {"x_new": 1, "kv_transfer_params": FOR_DECODE, "return_token_ids": True}


def test_once_d_is_seen_to_digest_nothing_is_asked_for(world: World) -> None:
    ask(world, body(MARKED), final())
    seen = ask(world, body(FROM_P), final())
    assert orjson.loads(body(FROM_P)) == seen.decode


def test_without_transfer_parameters_d_is_left_alone(world: World) -> None:
    smuggled = {"kv_transfer_params": None, "vllm_xargs": {"kv_transfer_params": "x"}}
    for sent, left in ((CHAT, CHAT), (CHAT | smuggled, CHAT | {"vllm_xargs": {}})):
        seen = ask(world, orjson.dumps(sent), {"choices": []})
        assert seen.decode == left
        assert seen.forwarded.set_headers == ()
        assert seen.response_headers.watch is False


def test_the_load_balancer_learns_the_conversation_and_the_guard_the_secret(world: World) -> None:
    world.settings = GatewaySettings(worker_secret="s3")
    headers = ask(world, body(MARKED), final()).forwarded.set_headers
    assert header(headers, "x-kvloop-secret") == "s3"
    assert len(header(headers, "x-kvloop-conversation") or "") == 32


def test_other_paths_pass_untouched(world: World) -> None:
    seen = world.run([*world.request(b"x", path="/tokenize"), *world.response(b"y")])
    assert seen.forwarded == ForwardRequest(b"x")


# --- what the orchestrator sees ---------------------------------------------------------------------------------------


def test_the_handle_is_hidden_and_the_receipt_of_the_prefill_leg_is_shown(world: World) -> None:
    seen = ask(world, body(MARKED), final())
    assert b"remote_block_ids" not in seen.client_body
    assert receipt_of(seen) == {"outcome": "reused", "reused": "64"}
    assert str(seen.receipt.outcome) == "watched"


def test_without_a_mark_the_receipt_is_the_decode_legs_own(world: World) -> None:
    assert receipt_of(ask(world, body(FROM_P), final())) == {"outcome": "watched"}


def test_parameters_of_another_protocol_stay(world: World) -> None:
    message = {"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": 7}}
    seen = ask(world, body(MARKED), message)
    assert seen.client_body == sse(message)
    assert seen.receipt.captured == "not_for_prefill"


def test_an_orchestrator_that_carries_handles_gets_them_as_a_stock_d_would_say_them(world: World) -> None:
    world.settings = GatewaySettings(handle_owner="orchestrator")
    seen = ask(world, body(MARKED), final(), x_conversation_id="")
    assert seen.client_body == sse(final() | {"kv_transfer_params": handle_params(len(HELD))})
    assert seen.receipt.captured == "kept"


def test_a_handle_without_a_request_id_belongs_to_nobody(world: World) -> None:
    world.settings = GatewaySettings(handle_owner="orchestrator")
    seen = ask(world, body(MARKED), final(remote_request_id=""))
    assert [release.reason for release in seen.releases] == ["no_conversation"]


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "fate"),
    [
        (body(MARKED), []),
        (body(FROM_P), ["prompt_unmarked"]),
        (body(put_mark(FROM_P, [9, *PROMPT[1:]], "")), ["prompt_ids_differ"]),
        (body(put_mark(FROM_P, [*PROMPT[:99], 9], "")), ["prompt_ids_differ"]),
        (body(DECODE_ALONE), []),
        (body(MARKED, n=2), ["several_sequences"]),
    ],
    ids=["marked", "unmarked", "other tokens", "another last token", "prefilled by d itself", "several sequences"],
)
def test_a_handle_is_kept_only_if_p_is_known_to_have_prefilled_d_s_tokens(
    world: World, sent: bytes, fate: list[str]
) -> None:
    seen = ask(world, sent, final())
    assert [release.reason for release in seen.releases] == fate
    assert len(world.store) == (0 if fate else 1)


def test_without_a_conversation_d_s_blocks_are_released_at_once(world: World) -> None:
    seen = ask(world, body(MARKED), final(), x_conversation_id="")
    assert "return_token_ids" not in seen.decode
    assert [release.reason for release in seen.releases] == ["no_conversation"]


def test_without_tokens_nothing_is_kept(world: World) -> None:
    message = {"choices": [], "kv_transfer_params": handle_params(len(HELD))}
    seen = ask(world, body(MARKED), message)
    assert [release.reason for release in seen.releases] == ["no_sequence"]


def test_with_reuse_off_nothing_is_asked_or_kept(world: World) -> None:
    world.settings = GatewaySettings(reuse=False)
    seen = ask(world, body(MARKED), final())
    assert "return_token_ids" not in seen.decode
    assert [release.reason for release in seen.releases] == ["reuse_off"]


def test_an_answer_in_one_piece_is_read_as_well(world: World) -> None:
    message = final() | {"id": "chatcmpl-1", "usage": {"total_tokens": 102}}
    response = world.response(orjson.dumps(message), content_type="application/json")
    seen = world.run([*world.request(body(MARKED, stream=False), x_conversation_id="c1"), *response])
    assert orjson.loads(seen.client_body) == message | {"kv_transfer_params": None}
    assert seen.receipt.captured == "kept"
