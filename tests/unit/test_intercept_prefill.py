"""The role prefill, branch by branch: what gets a handle, what stands aside, and what the orchestrator is answered."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from world import BLOCK_SIZE, FOR_DECODE, Seen, World, handle_params

from extproc import proof
from extproc.events import Call, ForwardRequest, Leg, LegResult, header
from extproc.handle import COLD_PREFILL, read_publication
from extproc.identity import IdentityRules, find_conversation, handle_key
from extproc.intercept_prefill import PrefillExchange
from extproc.prompt_mark import MARK_KEY
from extproc.settings import GatewaySettings
from extproc.store import StoredTurn

HELD = list(range(200))
PROMPT = [*HELD, 900, 901]
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
    "stream": False,
    "kv_transfer_params": COLD,
}
FOREIGN = COLD | {"remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1]], "remote_host": "evil"}


def kept(world: World, key: Any = None) -> None:
    publication = read_publication(orjson.dumps(handle_params(len(HELD), digest_of=HELD)))
    turn = StoredTurn(publication.handle, proof.fingerprint(HELD), BLOCK_SIZE, "m", world.now + 450)
    rules = IdentityRules(("x-conversation-id",), (), "authorization", 256)
    world.store.put(key or find_conversation((("x-conversation-id", "c1"),), {"model": "m"}, rules), turn)


def answer(world: World, **changes: Any) -> LegResult:
    return world.answer(200, {"prompt_token_ids": PROMPT, "kv_transfer_params": FOR_DECODE, "choices": []} | changes)


@pytest.fixture
def world() -> World:
    """A world in the role prefill with a kept turn, and a P that reads what it is given."""
    world = World(role=PrefillExchange)

    def prefill(call: Call) -> LegResult:
        read = orjson.loads(call.body)["kv_transfer_params"].get("remote_num_tokens", 0)
        return answer(world, kv_transfer_params=FOR_DECODE | {"remote_prefill_cached_tokens": read})

    world.prefill = prefill
    world.render = lambda _: world.answer(200, {"token_ids": PROMPT})
    kept(world)
    return world


def ask(world: World, body: Any = BODY, **headers: str) -> Seen:
    headers.setdefault("x_conversation_id", "c1")
    response = world.response(b"{}", content_type="application/json")
    return world.run([*world.request(body, **headers), *response])


def outcome(seen: Seen) -> tuple[str, str | None]:
    reason = seen.receipt.reason
    return str(seen.receipt.outcome), None if reason is None else str(reason)


# --- reuse ----------------------------------------------------------------------------------------------------------


def test_a_prefill_leg_gets_the_handle_and_keeps_its_own_fields(world: World) -> None:
    seen = ask(world, BODY | {"logprobs": True, "min_tokens": 1, "x_new": {"a": 1}})
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg == BODY | {
        "logprobs": True,
        "min_tokens": 1,
        "x_new": {"a": 1},
        "kv_transfer_params": handle_params(len(HELD)) | {"prompt_token_ids": PROMPT},
        "return_token_ids": True,
    }
    assert outcome(seen) == ("reused", None)
    assert header(seen.replied.headers, "x-kvloop-receipt") == seen.receipt.header_value()


def test_the_orchestrator_gets_p_s_answer_with_a_mark_and_without_ids(world: World) -> None:
    answered = orjson.loads(ask(world).replied.body)
    mark = answered["kv_transfer_params"].pop(MARK_KEY)
    assert mark["tokens"] == len(PROMPT)
    assert answered == {
        "prompt_token_ids": None,
        "kv_transfer_params": FOR_DECODE | {"remote_prefill_cached_tokens": 200},
        "choices": [],
    }


def test_an_orchestrator_that_asks_for_ids_gets_them(world: World) -> None:
    assert orjson.loads(ask(world, BODY | {"return_token_ids": True}).replied.body)["prompt_token_ids"] == PROMPT


def test_the_call_goes_to_the_worker_the_listener_stands_for(world: World) -> None:
    world.worker = "prefill_1"
    assert {header(call.headers, "x-kvloop-worker") for call in ask(world).calls} == {"prefill_1"}


def test_without_a_kept_turn_the_leg_is_cold_with_the_orchestrators_parameters(world: World) -> None:
    params = COLD | {"remote_engine_id": None, "x_new": 1}
    seen = ask(world, BODY | {"kv_transfer_params": params}, x_conversation_id="c2")
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == params
    assert outcome(seen) == ("cold", "nothing_kept")
    assert MARK_KEY in orjson.loads(seen.replied.body)["kv_transfer_params"]


def test_a_handle_nobody_knows_is_not_passed_on(world: World) -> None:
    seen = ask(world, BODY | {"kv_transfer_params": FOREIGN}, x_conversation_id="c2")
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == COLD


def test_a_header_may_mark_prefill_legs(world: World) -> None:
    world.settings = GatewaySettings(prefill_header="X-Prefill")
    body = {key: value for key, value in BODY.items() if key != "kv_transfer_params"}
    assert outcome(ask(world, body, x_prefill="")) == ("reused", None)
    assert outcome(ask(world, body)) == ("passed", "not_prefill")


def test_an_orchestrator_s_own_handle_finds_what_proves_it(world: World) -> None:
    world.settings = GatewaySettings(handle_owner="orchestrator")
    kept(world, handle_key("e", "r"))
    seen = ask(world, BODY | {"kv_transfer_params": FOREIGN}, x_conversation_id="")
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == handle_params(len(HELD)) | {"prompt_token_ids": PROMPT}


@pytest.mark.parametrize("change", [{"remote_engine_id": ""}, {"remote_request_id": None}])
def test_an_orchestrator_s_handle_without_a_name_is_dropped(world: World, change: dict[str, Any]) -> None:
    world.settings = GatewaySettings(handle_owner="orchestrator")
    seen = ask(world, BODY | {"kv_transfer_params": FOREIGN | change}, x_conversation_id="")
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == COLD
    assert outcome(seen) == ("cold", "nothing_kept")


def test_with_reuse_off_an_orchestrator_s_handle_is_dropped_too(world: World) -> None:
    world.settings = GatewaySettings(handle_owner="orchestrator", reuse=False)
    seen = ask(world, BODY | {"kv_transfer_params": COLD}, x_conversation_id="")
    assert outcome(seen) == ("cold", "reuse_off")


# --- P fails ----------------------------------------------------------------------------------------------------------


def failing_once(world: World, **result: Any):
    """A P that fails while a handle is attached."""

    def prefill(call: Call) -> LegResult:
        is_attached = "remote_block_ids" in orjson.loads(call.body)["kv_transfer_params"]
        return world.answer(**result) if is_attached else answer(world)

    return prefill


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"status": 500, "body": b"boom"}, "prefill_failed"),
        ({"status": 0, "body": b"", "error": "timeout"}, "prefill_timeout"),
        ({"status": 200, "body": {"choices": []}}, "prefill_without_kv"),
    ],
)
def test_hazard_18_a_p_that_fails_over_a_handle_is_asked_again_without(
    world: World, result: dict[str, Any], reason: str
) -> None:
    world.prefill = failing_once(world, **result)
    seen = ask(world)
    assert [leg["kv_transfer_params"].get("remote_num_tokens") for leg in seen.leg_bodies(Leg.PREFILL)] == [200, None]
    assert (seen.replied.status, *outcome(seen)) == (200, "cold", reason)
    assert len(world.store) == 0
    ids = [header(call.headers, "x-request-id") for call in seen.calls]
    assert len(set(ids)) == len(ids)


def test_p_s_own_errors_reach_the_orchestrator_as_they_are(world: World) -> None:
    world.prefill = lambda _: world.answer(400, b'{"error":{"message":"too long"}}', content_type="application/json")
    seen = ask(world)
    assert (seen.replied.status, seen.replied.body) == (400, b'{"error":{"message":"too long"}}')
    assert outcome(seen) == ("refused", "client_error")
    # P's engine never saw the handle.
    assert [release.reason for release in seen.releases] == ["refused"]


def test_the_guard_s_refusal_is_told_as_the_gateway_s_own_fault(world: World) -> None:
    world.prefill = lambda _: world.answer(0, b"", error="guard_refused")
    seen = ask(world, x_conversation_id="c3")
    assert seen.replied.status == 503
    assert b"another secret" in seen.replied.body
    assert outcome(seen) == ("refused", "guard_refused")


def test_a_broken_p_is_passed_on_too(world: World) -> None:
    world.prefill = lambda _: world.answer(500, b"boom", content_type="text/plain")
    seen = ask(world, x_conversation_id="c2")
    assert (seen.replied.status, seen.replied.body) == (500, b"boom")
    assert header(seen.replied.headers, "content-type") == "text/plain"
    assert outcome(seen) == ("refused", "prefill_failed")


def test_a_p_without_kv_transfer_is_passed_on_unmarked(world: World) -> None:
    world.prefill = lambda _: world.answer(200, {"choices": []})
    seen = ask(world, x_conversation_id="c2")
    assert (seen.replied.body, *outcome(seen)) == (b'{"choices":[]}', "cold", "prefill_without_kv")


def test_an_answer_without_ids_is_passed_on_unmarked(world: World) -> None:
    world.prefill = lambda _: answer(world, prompt_token_ids=None)
    seen = ask(world, x_conversation_id="c2")
    assert orjson.loads(seen.replied.body)["kv_transfer_params"] == FOR_DECODE


@pytest.mark.parametrize(("error", "status"), [("timeout", 504), ("unreachable", 503)])
def test_a_p_that_does_not_answer_is_an_honest_error(world: World, error: str, status: int) -> None:
    world.prefill = lambda _: world.answer(0, b"", error=error)
    seen = ask(world)
    assert seen.replied.status == status
    assert orjson.loads(seen.replied.body)["error"]["type"] == "server_error"
    assert outcome(seen) == ("refused", f"prefill_{error}")


@pytest.mark.parametrize("salt", [None, "s"])
def test_a_p_that_prefills_other_tokens_is_asked_again_where_it_has_nothing_cached(
    world: World, salt: str | None
) -> None:
    body = BODY if salt is None else BODY | {"cache_salt": salt}
    world.prefill = lambda _: answer(world, prompt_token_ids=[1, 2, 3])
    if salt:
        rules = IdentityRules(("x-conversation-id",), (), "authorization", 256)
        kept(world, find_conversation((("x-conversation-id", "c1"),), {"model": "m", "cache_salt": salt}, rules))
    seen = ask(world, body)
    first, second = seen.leg_bodies(Leg.PREFILL)
    assert first.get("cache_salt") == salt
    assert second["cache_salt"].startswith(f"{salt or ''}-r1-")
    assert second["kv_transfer_params"] == COLD
    assert outcome(seen) == ("cold", "prompt_ids_differ")
    assert world.pool.prompt_ids_differed
    assert outcome(ask(world, body)) == ("cold", "prompt_ids_differ")


# --- standing aside ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, ("passed", "not_prefill")),
        ({"kv_transfer_params": None}, ("passed", "not_prefill")),
        ({"stream": True}, ("cold", "streamed_prefill")),
        ({"n": 2}, ("cold", "several_sequences")),
        ({"prompt_logprobs": 1}, ("cold", "prompt_logprobs")),
    ],
)
def test_what_gets_no_handle_goes_on_as_it_came(
    world: World, changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    body = orjson.dumps(BODY | changes)
    seen = ask(world, body)
    assert seen.forwarded == ForwardRequest(body)
    assert (seen.response_headers.watch, seen.calls, len(world.store)) == (False, [], 1)
    assert outcome(seen) == expected


@pytest.mark.parametrize(("conversation", "reason"), [("", "no_conversation"), ("x" * 257, "invalid_conversation_id")])
def test_without_a_conversation_the_leg_goes_on_as_it_came(world: World, conversation: str, reason: str) -> None:
    seen = ask(world, x_conversation_id=conversation)
    assert seen.forwarded == ForwardRequest(orjson.dumps(BODY))
    assert outcome(seen) == ("cold", reason)


@pytest.mark.parametrize("changes", [{"stream": True}, {"n": 2}])
def test_a_handle_nobody_has_proven_does_not_go_on_with_it(world: World, changes: dict[str, Any]) -> None:
    body = BODY | changes | {"kv_transfer_params": FOREIGN, "return_token_ids": False}
    assert ask(world, body).decode == body | {"kv_transfer_params": COLD}


def test_the_guard_s_secret_goes_with_prefill_legs_and_with_nothing_else(world: World) -> None:
    world.settings = GatewaySettings(worker_secret="s3")
    seen = ask(world, BODY | {"n": 2})
    assert header(seen.forwarded.set_headers, "x-kvloop-secret") == "s3"
    strange = {"do_remote_prefill": True, "remote_host": "evil"}
    assert ask(world, BODY | {"kv_transfer_params": strange}).forwarded.set_headers == ()


def test_what_a_client_smuggles_past_the_orchestrator_does_not_go_on(world: World) -> None:
    seen = ask(world, BODY | {"n": 2, "vllm_xargs": {"kv_transfer_params": "x"}})
    assert seen.decode == BODY | {"n": 2, "vllm_xargs": {}}


def test_a_leg_marked_by_header_gets_the_parameters_of_one(world: World) -> None:
    world.settings = GatewaySettings(prefill_header="x-prefill")
    body = {key: value for key, value in BODY.items() if key != "kv_transfer_params"} | {"n": 2}
    assert ask(world, body, x_prefill="1").decode == body | {"kv_transfer_params": COLD}


def test_only_what_is_not_the_orchestrators_own_counts_as_forbidden(world: World) -> None:
    assert ask(world).receipt.forbidden_fields_removed == 0
    seen = ask(world, BODY | {"vllm_xargs": {"kv_transfer_params": "x"}})
    assert seen.receipt.forbidden_fields_removed == 1
    assert all(b'vllm_xargs":{}' in call.body for call in seen.calls if call.leg is Leg.PREFILL)


def test_other_paths_pass_untouched(world: World) -> None:
    seen = world.run([*world.request(b"x", path="/tokenize"), *world.response(b"y")])
    assert seen.forwarded == ForwardRequest(b"x")


def test_the_cold_parameters_are_what_the_core_spells() -> None:
    assert orjson.loads(COLD_PREFILL) == COLD


def test_a_conversation_that_ends_is_released_if_its_last_prefill_leg_cannot_use_it(world: World) -> None:
    world.settings = GatewaySettings(reuse=False)
    seen = ask(world, x_kvloop_end="true")
    assert [release.reason for release in seen.releases] == ["ended"]


def test_a_request_p_refuses_to_render_and_to_prefill_leaves_the_kept_turn(world: World) -> None:
    world.render = lambda _: world.answer(400, b"{}")
    world.prefill = lambda _: world.answer(400, b"{}")
    seen = ask(world)
    assert (seen.replied.status, len(world.store)) == (400, 1)
