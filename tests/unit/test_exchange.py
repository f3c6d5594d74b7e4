"""The exchange, branch by branch: identity, proof, the failure ladder, capture, and what Envoy may send."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import BLOCK_SIZE, ENGINE, FOR_DECODE, Seen, World, handle_params, receipt_of, sse

from extproc import proof
from extproc.admission import Load
from extproc.errors import EnvoyProtocolError
from extproc.events import (
    Call,
    Ended,
    ForwardChunk,
    ForwardRequest,
    ForwardResponseHeaders,
    ForwardTrailers,
    Leg,
    LegResult,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    header,
)
from extproc.handle import read_publication
from extproc.identity import IdentityRules, find_conversation
from extproc.receipt import Outcome, Reason, Stage
from extproc.settings import GatewaySettings
from extproc.sse import EventTooLarge
from extproc.store import ReturnedTurn, StoredTurn

HELD = list(range(200))
PROMPT = [*HELD, 900, 901]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
RULES = IdentityRules(("x-conversation-id",), (), "authorization", 256)


def key_of(model: str = "m"):
    key = find_conversation((("x-conversation-id", "c1"),), {"model": model}, RULES)
    assert key is not None
    return key


def kept(world: World, held: list[int] | None = None, **changes: Any) -> None:
    """Put a finished turn of conversation c1 into the store."""
    tokens = HELD if held is None else held
    publication = read_publication(orjson.dumps(handle_params(len(tokens), digest_of=tokens)))
    turn = StoredTurn(publication.handle, proof.fingerprint(tokens), BLOCK_SIZE, "m", world.now + 450)
    world.store.put(key_of(), dataclasses.replace(turn, **changes))


def prefilled(world: World, ids: list[int] | None = None, **params: Any) -> LegResult:
    body = {"kv_transfer_params": FOR_DECODE | params, "prompt_token_ids": PROMPT if ids is None else ids}
    return world.answer(200, body)


@pytest.fixture
def world() -> World:
    """A world with a kept turn, a P that renders ``PROMPT`` and reads what it is given."""
    world = World()

    def prefill(call: Call) -> LegResult:
        params = orjson.loads(call.body)["kv_transfer_params"]
        return prefilled(world, remote_prefill_cached_tokens=params.get("remote_num_tokens", 0))

    world.prefill = prefill
    world.render = lambda _: world.answer(200, {"token_ids": PROMPT})
    kept(world)
    return world


def ask(world: World, body: Any = CHAT, *, response: list[Any] | None = None, **headers: str) -> Seen:
    headers.setdefault("x_conversation_id", "c1")
    events = world.request(body, **headers)
    return world.run([*events, *(world.response(sse({"choices": []})) if response is None else response)])


def final(tokens: int = 210, **changes: Any) -> bytes:
    """D's last chunk, with a handle that carries its own digest."""
    params = handle_params(tokens, digest_of=list(range(tokens)), **changes)
    return sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": params})


# --- what keeps a turn cold ---------------------------------------------------------------------------------------


def test_a_kept_turn_is_attached_once_proven(world: World) -> None:
    seen = ask(world)
    assert seen.leg_bodies(Leg.PREFILL)[0]["kv_transfer_params"]["remote_num_tokens"] == len(HELD)
    assert receipt_of(seen)["outcome"] == "reused"
    assert len(world.store) == 0


def test_hazard_07_of_two_equal_turns_one_gets_the_handle(world: World) -> None:
    first, second = ask(world), ask(world)
    assert receipt_of(first)["outcome"] == "reused"
    assert receipt_of(second) == {
        "outcome": "cold", "reason": "nothing_kept", "reused": "0", "prompt": "202", "prefill_ms": "250.0",
    }  # fmt: skip


def test_no_conversation_is_cold_and_touches_no_store(world: World) -> None:
    seen = ask(world, x_conversation_id="")
    assert receipt_of(seen)["reason"] == "no_conversation"
    assert len(world.store) == 1
    assert header(seen.forwarded.set_headers, "x-kvloop-conversation") is None


def test_hazard_09_an_oversized_id_is_no_conversation(world: World) -> None:
    assert receipt_of(ask(world, x_conversation_id="x" * 257))["reason"] == "invalid_conversation_id"


def test_the_decode_leg_carries_the_hashed_conversation_for_the_load_balancer(world: World) -> None:
    assert header(ask(world).forwarded.set_headers, "x-kvloop-conversation") == str(key_of())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"reuse": False}, "reuse_off"), ({"prefill_bidirectional": False}, "not_bidirectional")],
)
def test_reuse_can_be_ruled_out_by_a_setting(world: World, setting: dict[str, Any], reason: str) -> None:
    world.settings = GatewaySettings(**setting)
    seen = ask(world, response=world.response(final()))
    assert receipt_of(seen)["reason"] == reason
    assert len(world.store) == 1
    # What D pinned for this turn is not going to be read either.
    assert [release.reason for release in seen.releases] == [reason]


def test_images_are_never_reused_or_captured(world: World) -> None:
    picture = CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}
    seen = ask(world, picture, response=world.response(final()))
    assert receipt_of(seen)["reason"] == "non_text"
    assert "prompt_token_ids" not in seen.decode["kv_transfer_params"]
    assert [release.reason for release in seen.releases] == ["non_text"]


def test_hazard_06_a_handle_is_dead_at_its_deadline_and_is_released(world: World) -> None:
    world.now += 450
    seen = ask(world)
    assert receipt_of(seen)["reason"] == "expired"
    assert [release.reason for release in seen.releases] == ["expired"]


def test_hazard_06_a_handle_lives_until_its_deadline(world: World) -> None:
    world.now += 449.999
    assert receipt_of(ask(world))["outcome"] == "reused"


def test_hazard_06_a_slow_render_can_outlive_the_handle(world: World) -> None:
    def slow(_: Call) -> LegResult:
        world.now += 451
        return world.answer(200, {"token_ids": PROMPT})

    world.render = slow
    world.settings = GatewaySettings(preparation_timeout_seconds=500)
    assert receipt_of(ask(world))["reason"] == "expired"


@pytest.mark.parametrize(
    "rendering",
    [
        {"status": 403, "body": {"error": "scale-out is off"}},
        {"status": 200, "body": b"not json"},
        {"status": 200, "body": {"token_ids": []}},
        {"status": 200, "body": {"token_ids": PROMPT, "features": {"mm_hashes": {}}}},
        {"status": 200, "body": [{"token_ids": PROMPT}, {"token_ids": PROMPT}]},
        {"status": 0, "body": b"", "error": "timeout"},
    ],
)
def test_without_a_rendered_prompt_the_turn_is_cold(world: World, rendering: dict[str, Any]) -> None:
    world.render = lambda _: world.answer(**rendering)
    seen = ask(world)
    assert receipt_of(seen)["outcome"] == "cold"
    assert receipt_of(seen)["reason"] == "render_failed"
    assert [release.reason for release in seen.releases] == ["render_failed"]


def test_a_rewritten_history_is_cold_and_releases_the_handle(world: World) -> None:
    kept(world, [9, *HELD[1:]])
    seen = ask(world)
    assert receipt_of(seen)["reason"] == "history_differs"
    assert [release.reason for release in seen.releases] == ["history_differs"]


def test_a_proven_beginning_is_reused_in_whole_blocks(world: World) -> None:
    kept(world, [*HELD[:130], 7, *HELD[131:]])
    seen = ask(world)
    (leg,) = seen.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"]["remote_num_tokens"] == 128
    assert leg["kv_transfer_params"]["remote_block_ids"] == [[1, 2, 3, 4]]
    assert receipt_of(seen)["outcome"] == "partial"
    assert seen.releases == []


@pytest.mark.parametrize(("block_size", "reason"), [(None, "block_size_unknown"), (48, "blocks_unexplained")])
@pytest.mark.parametrize("held", [HELD, [*HELD[:130], 7, *HELD[131:]]], ids=["whole", "part"])
def test_a_handle_whose_blocks_cannot_be_checked_is_released(
    world: World, held: list[int], block_size: int | None, reason: str
) -> None:
    kept(world, held, block_size_tokens=block_size)
    seen = ask(world)
    assert receipt_of(seen)["reason"] == reason
    assert [release.reason for release in seen.releases] == [reason]


def test_the_block_size_may_come_from_settings(world: World) -> None:
    world.settings = GatewaySettings(decode_block_size_tokens=BLOCK_SIZE)
    kept(world, [*HELD[:130], 7, *HELD[131:]], block_size_tokens=None)
    assert receipt_of(ask(world))["outcome"] == "partial"


def test_a_token_id_prompt_needs_no_render(world: World) -> None:
    world.render = None
    body = {"model": "m", "prompt": PROMPT}
    seen = ask(world, body, path="/v1/completions")
    assert receipt_of(seen)["outcome"] == "reused"
    assert seen.decode["prompt"] == PROMPT
    assert "prompt_token_ids" not in seen.decode["kv_transfer_params"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "several_sequences"),
        ({"best_of": 2}, "several_sequences"),
        ({"use_beam_search": True}, "several_sequences"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "prompt_logprobs"),
    ],
)
def test_hazard_36_46_requests_one_handle_cannot_serve_go_to_d_as_they_are(
    world: World, fields: dict[str, Any], reason: str
) -> None:
    body = CHAT | fields
    seen = ask(world, body)
    assert seen.calls == []
    assert seen.decode == body
    assert receipt_of(seen) == {"outcome": "decode_only", "reason": reason}
    assert seen.response_headers.watch is False
    assert len(world.store) == 1


# --- the ladder -----------------------------------------------------------------------------------------------------


def legs_in_turn(*answers: LegResult):
    """A P that gives these answers, one per leg."""
    pending = iter(answers)
    return lambda _: next(pending)


def test_hazard_18_a_failed_leg_with_a_handle_is_tried_once_more_without(world: World) -> None:
    world.prefill = legs_in_turn(world.answer(500, {"error": {}}), prefilled(world))
    seen = ask(world)
    first, second = seen.leg_bodies(Leg.PREFILL)
    assert "remote_engine_id" in first["kv_transfer_params"]
    assert second["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": PROMPT,
    }
    assert receipt_of(seen)["outcome"] == "cold"
    assert receipt_of(seen)["reason"] == "prefill_failed"
    assert receipt_of(seen)["prefill_ms"] == "500.0"
    ids = [header(call.headers, "x-request-id") for call in seen.calls if call.leg is Leg.PREFILL]
    assert ids == ["r1-prefill-reuse", "r1-prefill-cold"]
    # It may have been read: it never comes back, and D is told only when P cannot be reading any more.
    (release,) = seen.releases
    assert release.after_seconds == world.settings.reuse_timeout_seconds
    assert len(world.store) == 0


def test_hazard_14_a_parked_leg_ends_at_its_timeout(world: World) -> None:
    world.prefill = legs_in_turn(world.answer(0, b"", error="timeout"), prefilled(world))
    seen = ask(world)
    assert receipt_of(seen)["reason"] == "prefill_timeout"
    timeouts = [call.timeout_seconds for call in seen.calls if call.leg is Leg.PREFILL]
    assert timeouts == [world.settings.reuse_timeout_seconds, world.settings.prefill_timeout_seconds]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 0, "body": b"", "error": "unreachable"}, "prefill_unreachable"),
        ({"status": 0, "body": b"", "error": "timeout"}, "prefill_timeout"),
        ({"status": 503, "body": b"no healthy upstream"}, "prefill_failed"),
        ({"status": 200, "body": {"choices": []}}, "prefill_without_kv"),
        ({"status": 200, "body": b"}"}, "prefill_without_kv"),
    ],
)
def test_without_p_the_decode_worker_serves_alone(world: World, answer: dict[str, Any], reason: str) -> None:
    world.prefill = lambda _: world.answer(**answer)
    world.pool.digest_seen = True
    seen = ask(world, response=world.response(final()))
    assert seen.decode["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": False,
        "prompt_token_ids": PROMPT,
    }
    assert receipt_of(seen)["outcome"] == "decode_only"
    assert receipt_of(seen)["reason"] == reason
    # D's handle is as good as after a prefill leg.
    assert seen.receipt.captured == "kept"


def test_where_the_guard_knows_another_secret_d_serves_alone_without_parameters_which_its_guard_would_refuse(
    world: World,
) -> None:
    world.prefill = lambda _: world.answer(0, b"", error="guard_refused")
    world.pool.digest_seen = True
    seen = ask(world)
    assert receipt_of(seen)["outcome"] == "decode_only"
    assert receipt_of(seen)["reason"] == "guard_refused"
    assert seen.decode == CHAT


def test_a_stock_d_serves_alone_without_transfer_parameters_because_it_would_never_free_its_blocks(
    world: World,
) -> None:
    world.prefill = lambda _: world.answer(503, b"no healthy upstream")
    seen = ask(world)
    assert receipt_of(seen)["outcome"] == "decode_only"
    assert seen.decode == CHAT
    assert seen.response_headers.watch is False


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_p_s_client_errors_reach_the_client_unchanged_and_no_decode_leg_is_sent(world: World, status: int) -> None:
    body = b'{"error":{"message":"context too long","code":400}}'
    world.prefill = lambda _: world.answer(status, body, content_type="application/json; charset=utf-8")
    seen = ask(world)
    assert (seen.refused.status, seen.refused.body) == (status, body)
    assert seen.refused.headers[0] == ("content-type", "application/json; charset=utf-8")
    assert "outcome=refused, reason=client_error" in dict(seen.refused.headers)["x-kvloop-receipt"]
    assert not any(isinstance(answer, ForwardRequest) for answer in seen.answers)
    assert seen.receipt.outcome is Outcome.REFUSED


def test_a_p_that_computed_the_tokens_itself_is_a_failed_read(world: World) -> None:
    world.prefill = lambda _: prefilled(world, remote_prefill_cached_tokens=0)
    seen = ask(world)
    assert receipt_of(seen)["reason"] == "read_failed"
    assert [release.reason for release in seen.releases] == ["read_failed"], "D may still hold what P did not read"


def test_a_p_whose_own_cache_had_most_of_it_is_no_failed_read(world: World) -> None:
    world.prefill = lambda _: prefilled(world, remote_prefill_cached_tokens=len(HELD) - 63)
    assert receipt_of(ask(world))["outcome"] == "reused"


def test_what_p_s_own_cache_had_is_not_counted_as_reused(world: World) -> None:
    world.prefill = lambda _: prefilled(world, remote_prefill_cached_tokens=len(PROMPT) - 1)
    seen = receipt_of(ask(world))
    assert (seen["reused"], seen["cached"]) == (str(len(HELD)), str(len(PROMPT) - 1))
    cold = receipt_of(ask(world))
    assert (cold["outcome"], cold["reused"], cold["cached"]) == ("cold", "0", str(len(PROMPT) - 1))


def test_a_p_that_does_not_count_is_believed(world: World) -> None:
    world.prefill = lambda _: prefilled(world)
    assert receipt_of(ask(world))["reused"] == str(len(HELD))


@pytest.mark.parametrize("other", [[1, 2, 3], "absent"])
def test_a_p_that_prefilled_other_tokens_is_never_believed_again(world: World, other: Any) -> None:
    body = {"kv_transfer_params": FOR_DECODE} | ({} if other == "absent" else {"prompt_token_ids": other})
    world.prefill = lambda _: world.answer(200, body)
    seen = ask(world)
    assert receipt_of(seen)["outcome"] == "decode_only"
    assert receipt_of(seen)["reason"] == "prompt_ids_differ"
    # P's KV is not used, not even for this turn.
    assert "kv_transfer_params" not in seen.decode
    kept(world)
    assert receipt_of(ask(world))["reason"] == "prompt_ids_differ"
    assert len(world.store) == 1


def test_a_cold_leg_that_prefilled_other_tokens_is_not_used_but_condemns_nobody(world: World) -> None:
    """Nothing was attached, so nothing can be poisoned; and a client must not be able to switch reuse off for all."""
    world.prefill = lambda _: prefilled(world, [1, 2])
    world.store.take(key_of())
    seen = ask(world, {"model": "m", "prompt": PROMPT}, path="/v1/completions")
    assert receipt_of(seen)["outcome"] == "decode_only"
    assert receipt_of(seen)["reason"] == "prompt_ids_differ"
    assert not world.pool.prompt_ids_differed


def test_a_cold_p_that_returns_no_ids_leaves_tokenising_to_d(world: World) -> None:
    world.store.take(key_of())
    world.prefill = lambda _: world.answer(200, {"kv_transfer_params": FOR_DECODE})
    seen = ask(world)
    assert "prompt_token_ids" not in seen.decode["kv_transfer_params"]
    assert "prompt" not in receipt_of(seen)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_handle_p_refused_to_look_at_is_released(world: World, status: int) -> None:
    """A bad field in turn 2 must not pin turn 1's blocks on D for the whole TTL: P's engine never saw the handle."""
    world.prefill = lambda _: world.answer(status, {"error": {}})
    seen = ask(world, response=[])
    assert seen.refused.status == status
    assert [release.reason for release in seen.releases] == ["refused"]


def test_a_turn_taken_but_never_sent_is_released_when_the_exchange_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.attaching.prove", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ask(world)
    assert len(world.store) == 0
    assert [release.reason for release in world.released] == ["failed"]


# --- what the workers are told ------------------------------------------------------------------------------------


def test_the_client_s_headers_reach_the_prefill_leg_without_the_connection_s_own(world: World) -> None:
    seen = ask(
        world,
        x_api_key="k",
        traceparent="00-1",
        x_kvloop_leg="mine",
        x_envoy_retry_on="5xx",
        connection="close",
        accept_encoding="gzip",
        content_length="5",
    )
    render, prefill = seen.calls[0], seen.calls[1]
    assert header(prefill.headers, "x-api-key") == "k"
    assert header(prefill.headers, "traceparent") == "00-1"
    assert [value for name, value in prefill.headers if name == "x-kvloop-leg"] == ["prefill"]
    assert [value for name, value in render.headers if name == "x-kvloop-leg"] == ["render"]
    names = [name for name, _ in prefill.headers]
    assert not {"x-envoy-retry-on", "connection", "accept-encoding", "content-length", ":path"} & set(names)


def test_the_secret_goes_with_transfer_parameters_and_only_then(world: World) -> None:
    world.settings = GatewaySettings(worker_secret="s3cret")
    assert header(ask(world).forwarded.set_headers, "x-kvloop-secret") == "s3cret"
    assert header(ask(world, CHAT | {"n": 2}).forwarded.set_headers, "x-kvloop-secret") is None


def test_hazard_39_d_is_not_asked_for_a_compressed_answer(world: World) -> None:
    assert ask(world).forwarded.remove_headers == ("accept-encoding",)
    assert ask(world, CHAT | {"n": 2}).forwarded.remove_headers == ()


@pytest.mark.parametrize(
    ("source", "digest_seen", "asked"),
    [("auto", False, True), ("auto", True, False), ("token_ids", True, True), ("digest", False, False)],
)
def test_token_ids_are_asked_for_only_where_no_digest_comes(
    world: World, source: Any, digest_seen: bool, asked: bool
) -> None:
    world.settings = GatewaySettings(sequence_source=source)
    world.pool.digest_seen = digest_seen
    assert ask(world).decode.get("return_token_ids", False) is asked


def test_a_client_that_asked_for_token_ids_gets_them(world: World) -> None:
    chunk = sse({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [5]}], "prompt_token_ids": PROMPT})
    seen = ask(world, CHAT | {"return_token_ids": True}, response=world.response(chunk))
    assert seen.client_body == chunk


# --- capture --------------------------------------------------------------------------------------------------------


def captured_turn(world: World) -> StoredTurn:
    turn = world.store.take(key_of())
    assert turn is not None
    return turn


def test_a_digest_is_captured_and_stripped(world: World) -> None:
    seen = ask(world, response=world.response(final(210)))
    assert seen.receipt.captured == "kept"
    turn = captured_turn(world)
    assert turn.sequence == proof.fingerprint(list(range(210)))
    assert turn.block_size_tokens == BLOCK_SIZE
    assert b"kvloop_digest" not in turn.handle.raw
    assert turn.deadline == world.now + 450
    assert world.pool.digest_seen
    assert b"kv_transfer_params" not in seen.client_body
    assert seen.learns == []


def test_streamed_token_ids_are_captured_without_the_last_one(world: World) -> None:
    chunks = sse(
        {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": PROMPT},
        {"choices": [{"delta": {"content": "a"}, "token_ids": [11, 12]}]},
        {
            "choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [13]}],
            "kv_transfer_params": handle_params(len(PROMPT) + 2),
        },
    )
    seen = ask(world, response=world.response(chunks))
    assert captured_turn(world).sequence == proof.fingerprint([*PROMPT, 11, 12])
    assert not world.pool.digest_seen
    # A stock D does not say its block size: it is asked for, once.
    assert [learn.upstream_address for learn in seen.learns] == ["10.0.0.7:8200"]
    world.pool.learn_block_size(ENGINE, BLOCK_SIZE)
    assert ask(world, response=world.response(chunks)).learns == []


def test_if_ids_were_withheld_only_the_prompt_counts(world: World) -> None:
    """vLLM hides a hidden reasoning's token ids; counting on the rest would misplace every later token."""
    chunks = sse(
        {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": PROMPT},
        {"choices": [{"delta": {"content": "a"}}]},
        {
            "choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [13]}],
            "kv_transfer_params": handle_params(len(PROMPT) + 40),
        },
    )
    ask(world, response=world.response(chunks))
    assert captured_turn(world).sequence == proof.fingerprint(PROMPT)


def test_a_digest_of_fewer_tokens_than_the_handle_holds_proves_those(world: World) -> None:
    params = handle_params(210, digest_of=list(range(100)))
    ask(world, response=world.response(sse({"choices": [], "kv_transfer_params": params})))
    assert captured_turn(world).sequence.length == 100


@pytest.mark.parametrize("computed", [102, 103])
def test_the_last_token_never_counts_whether_d_computed_it_or_not(world: World, computed: int) -> None:
    prompt = list(range(100))
    chunks = sse(
        {"choices": [], "prompt_token_ids": prompt},
        {"choices": [{"token_ids": [1, 2, 3]}], "kv_transfer_params": handle_params(computed)},
    )
    ask(world, response=world.response(chunks))
    assert captured_turn(world).sequence == proof.fingerprint([*prompt, 1, 2])


@pytest.mark.parametrize("digest", [None, {"v": 2}, "x"])
def test_a_handle_without_known_tokens_is_released(world: World, digest: Any) -> None:
    params = handle_params(210, kvloop_digest=digest)
    seen = ask(world, response=world.response(sse({"choices": [], "kv_transfer_params": params})))
    assert seen.receipt.captured == "released"
    assert [release.reason for release in seen.releases] == ["no_sequence"]


def test_impossible_token_ids_prove_nothing(world: World) -> None:
    chunks = sse(
        {"choices": [], "prompt_token_ids": [-1, 2**40]},
        {"choices": [], "kv_transfer_params": handle_params(2)},
    )
    assert ask(world, response=world.response(chunks)).receipt.captured == "released"


def test_hazard_32_33_an_answer_without_handle_is_counted_and_the_next_turn_is_cold(world: World) -> None:
    stopped = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "###"}]}
    seen = ask(world, response=world.response(sse(stopped)))
    assert seen.receipt.captured == "absent"
    assert seen.answers[-1] == ForwardChunk(None, {"captured": "absent"})
    assert receipt_of(ask(world))["reason"] == "nothing_kept"


def test_a_turn_without_conversation_frees_d_at_once(world: World) -> None:
    seen = ask(world, x_conversation_id="", response=world.response(final()))
    assert [release.reason for release in seen.releases] == ["no_conversation"]
    assert b"kv_transfer_params" not in seen.client_body


def test_hazard_41_a_loopback_handle_is_not_kept(world: World) -> None:
    seen = ask(world, response=world.response(final(210, remote_host="localhost")))
    assert seen.receipt.captured == "loopback_host"
    assert len(world.store) == 0
    assert seen.releases == []
    assert b"localhost" not in seen.client_body


@pytest.mark.parametrize("host", ["192.0.2.7", "d-0.elsewhere", "127.1"])
def test_a_handle_from_outside_the_configured_pools_is_stripped_and_not_kept(world: World, host: str) -> None:
    world.settings = GatewaySettings(handle_hosts=("10.0.0.0/8", "*.pool"), single_host=True)
    seen = ask(world, response=world.response(final(remote_host=host)))
    assert seen.receipt.captured == "foreign_host"
    assert seen.receipt.refused_host == f"{host} from 10.0.0.7:8200"
    assert host.encode() not in seen.client_body
    assert (len(world.store), seen.releases) == (0, []), "P is sent nowhere, not even to release it"


@pytest.mark.parametrize("host", ["10.9.9.9", "d-0.pool", "localhost"])
def test_a_handle_from_the_configured_pools_is_kept(world: World, host: str) -> None:
    world.settings = GatewaySettings(handle_hosts=("10.0.0.0/8", "*.pool"), single_host=True)
    assert ask(world, response=world.response(final(remote_host=host))).receipt.captured == "kept"


def test_a_refused_host_is_told_without_its_sender_where_envoy_names_none(world: World) -> None:
    response = world.response(final(remote_host="169.254.169.254"))
    response[0] = dataclasses.replace(response[0], upstream_address=None)
    assert ask(world, response=response).receipt.refused_host == "169.254.169.254"


def test_hazard_41_on_a_single_host_it_is(world: World) -> None:
    world.settings = GatewaySettings(single_host=True)
    assert ask(world, response=world.response(final(210, remote_host="127.0.0.1"))).receipt.captured == "kept"


def test_hazard_43_a_handle_over_the_cap_is_stripped_but_not_kept(world: World) -> None:
    world.settings = GatewaySettings(handle_max_bytes=500)
    seen = ask(world, response=world.response(final(3000)))
    assert seen.receipt.captured == "too_large"
    assert b"remote_block_ids" not in seen.client_body
    assert seen.client_body.endswith(b"data: [DONE]\n\n")


def test_an_event_over_the_cap_ends_the_stream_with_an_error(world: World) -> None:
    world.settings = GatewaySettings(event_max_bytes=1000)
    with pytest.raises(EventTooLarge):
        ask(world, response=world.response(b"data: " + b"x" * 2000))


@pytest.mark.parametrize("changes", [{"transfer_mode": "push"}, {"remote_block_ids": []}, {"do_remote_prefill": True}])
def test_parameters_that_are_no_handle_are_stripped_and_named(world: World, changes: dict[str, Any]) -> None:
    seen = ask(world, response=world.response(final(210, **changes)))
    assert seen.receipt.captured in {"push_mode", "incomplete", "not_for_prefill"}
    assert b"kv_transfer_params" not in seen.client_body


def test_hazard_06_a_handle_s_time_counts_from_when_d_got_the_request(world: World) -> None:
    """D's clock starts when it finishes, and a client that reads slowly can hold the finish chunk back for minutes."""
    response = world.response(final())
    late = [dataclasses.replace(event, at=world.now + 100) for event in response]
    ask(world, response=late)
    assert captured_turn(world).deadline == world.now + 450


def test_hazard_06_a_handle_that_may_be_dead_on_arrival_is_released(world: World) -> None:
    late = [dataclasses.replace(event, at=world.now + 450) for event in world.response(final())]
    seen = ask(world, response=late)
    assert seen.receipt.captured == "released"
    assert [release.reason for release in seen.releases] == ["expired"]


# --- early return ---------------------------------------------------------------------------------------------------


def eager(world: World) -> World:
    world.settings = GatewaySettings(return_mode="eager", return_priority=7)
    return world


def streamed(prompt: list[int], generated: list[int], **params: Any) -> bytes:
    """D's stream with token ids, as asked for, and the handle of a D with the plugin."""
    ids = [*prompt, *generated]
    handle = handle_params(len(ids) - 1, digest_of=ids[:-1], **params)
    finish = {"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": generated[1:]}
    return sse(
        {"prompt_token_ids": prompt, "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": generated[:1]}]},
        {"choices": [finish], "kv_transfer_params": handle},
    )


def test_an_early_return_sends_p_the_finished_turn_with_its_own_handle(world: World) -> None:
    generated = list(range(500, 520))
    seen = ask(eager(world), CHAT | {"cache_salt": "s"}, response=world.response(streamed(PROMPT, generated)))
    (keep,) = seen.keeps
    assert keep.returning is not None
    body = orjson.loads(keep.returning.body)
    params = body.pop("kv_transfer_params")
    assert body == {
        "prompt": PROMPT + generated,
        "max_tokens": 1,
        "stream": False,
        "model": "m",
        "cache_salt": "s",
        "priority": 7,
    }
    assert (params["remote_num_tokens"], params["remote_host"]) == (len(PROMPT) + 19, "10.0.0.7")
    assert keep.returning.tokens == len(PROMPT) + 19
    assert b"token_ids" not in seen.client_body.replace(b'"token_ids":null', b"").replace(
        b'"prompt_token_ids":null', b""
    )


@pytest.mark.parametrize(
    "response",
    [
        streamed(PROMPT, list(range(500, 520)), remote_block_ids=[[1]]),
        final(),
        streamed(PROMPT[:10], list(range(500, 520))),
    ],
)
def test_what_cannot_be_proven_or_is_too_short_stays_on_d(world: World, response: bytes) -> None:
    (keep,) = ask(eager(world), response=world.response(response)).keeps
    assert keep.returning is None


def test_a_return_names_neither_model_nor_salt_nor_priority_where_there_is_none(world: World) -> None:
    world.settings = GatewaySettings(return_mode="adaptive")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "cache_salt": 5}
    (keep,) = ask(world, body, response=world.response(streamed(PROMPT, list(range(500, 520))))).keeps
    assert keep.returning is not None
    assert orjson.loads(keep.returning.body).keys() == {"prompt", "max_tokens", "stream", "kv_transfer_params"}


def came_back(world: World, cached: int | None, ids: list[int] | None = None) -> Seen:
    """Ask again after P has read the held tokens back; P says how many it had in its cache."""
    world.store.drain()
    world.returned[key_of()] = ReturnedTurn(proof.fingerprint(HELD), len(HELD))
    extra = {} if cached is None else {"remote_prefill_cached_tokens": cached}
    world.prefill = lambda _: prefilled(world, ids, **extra)
    return ask(world)


def test_a_turn_p_has_read_back_needs_neither_handle_nor_render(world: World) -> None:
    seen = came_back(world, cached=192)
    assert [call.leg for call in seen.calls] == [Leg.PREFILL]
    assert "remote_block_ids" not in seen.leg_bodies(Leg.PREFILL)[0]["kv_transfer_params"]
    assert header(seen.calls[0].headers, "x-kvloop-conversation") == str(key_of())
    assert {key: receipt_of(seen)[key] for key in ("outcome", "reused", "held")} == {
        "outcome": "local",
        "reused": "192",
        "held": "200",
    }


@pytest.mark.parametrize(
    ("cached", "ids"),
    [(0, None), (None, None), (192, [7, *PROMPT]), (192, [])],
    ids=["lost", "untold", "edited", "no ids"],
)
def test_only_what_p_had_and_what_is_the_same_is_claimed(
    world: World, cached: int | None, ids: list[int] | None
) -> None:
    receipt = receipt_of(came_back(world, cached, ids))
    assert (receipt["outcome"], receipt["reason"], receipt["reused"]) == ("cold", "return_lost", "0")


def test_a_conversation_that_ends_has_nothing_to_release_once_p_has_read_it_back(world: World) -> None:
    world.store.drain()
    world.returned[key_of()] = ReturnedTurn(proof.fingerprint(HELD), len(HELD))
    assert ask(world, CHAT | {"n": 2}, x_kvloop_end="true").releases == []
    assert world.returned == {}


# --- the end of a conversation, and requests the client has to mend -------------------------------------------------


def test_a_turn_that_ends_the_conversation_reuses_and_leaves_nothing(world: World) -> None:
    world.pool.note_handle(has_digest=False)
    seen = ask(world, response=world.response(final()), x_kvloop_end="True")
    assert receipt_of(seen)["outcome"] == "reused"
    assert [release.reason for release in seen.releases] == ["ended"]
    assert len(world.store) == 0
    assert "x-kvloop-end" in seen.forwarded.remove_headers
    assert "return_token_ids" not in seen.decode
    assert not any(name == "x-kvloop-end" for call in seen.calls for name, _ in call.headers)


@pytest.mark.parametrize("fields", [{"n": 2}, {"messages": [{"content": [{"type": "image_url"}]}]}])
def test_a_turn_that_cannot_reuse_ends_its_conversation_all_the_same(world: World, fields: dict[str, Any]) -> None:
    seen = ask(world, CHAT | fields, x_kvloop_end="true")
    assert [release.reason for release in seen.releases] == ["ended"]
    assert len(world.store) == 0


def test_ending_no_conversation_is_no_fault(world: World) -> None:
    seen = ask(world, x_conversation_id="", x_kvloop_end="true", response=world.response(final()))
    assert [release.reason for release in seen.releases] == ["no_conversation"]
    assert ask(world, CHAT | {"n": 2}, x_conversation_id="", x_kvloop_end="true").releases == []


def test_what_a_draining_engine_retains_is_released_not_kept(world: World) -> None:
    world.pool.draining_engines.add(ENGINE)
    seen = ask(world, response=world.response(final()))
    assert [release.reason for release in seen.releases] == ["engine_draining"]
    assert len(world.store) == 0


def refusing(world: World, status: int = 400) -> None:
    """Let P's front refuse whatever it is asked, as it does when a field is wrong."""
    world.render = lambda _: world.answer(status, {"error": "temperature"})
    world.prefill = lambda _: world.answer(status, {"error": "temperature"})


def test_a_request_the_client_has_to_mend_leaves_the_kept_turn_for_the_mended_one(world: World) -> None:
    render, prefill = world.render, world.prefill
    refusing(world)
    assert ask(world, response=[]).refused.status == 400
    assert world.released == []
    world.render, world.prefill = render, prefill
    assert receipt_of(ask(world))["outcome"] == "reused"
    assert receipt_of(ask(world))["reason"] == "nothing_kept"


def test_a_render_that_alone_refuses_costs_the_handle(world: World) -> None:
    world.render = lambda _: world.answer(403, {"error": "scale-out endpoints are disabled"})
    seen = ask(world)
    assert (receipt_of(seen)["outcome"], receipt_of(seen)["reason"]) == ("cold", "render_failed")
    assert [release.reason for release in seen.releases] == ["render_failed"]


def test_a_refused_request_that_ends_the_conversation_releases_it(world: World) -> None:
    refusing(world)
    seen = ask(world, response=[], x_kvloop_end="true")
    assert [release.reason for release in seen.releases] == ["ended"]
    assert len(world.store) == 0


def test_a_refused_request_does_not_displace_what_a_twin_left_meanwhile(world: World) -> None:
    refusing(world)
    kept_before = world.store.take(key_of())
    assert kept_before is not None
    kept(world)

    def twin_finishes(_: Call) -> LegResult:
        kept(world, held=list(range(300)))
        return world.answer(400, {})

    world.prefill = twin_finishes
    seen = ask(world, response=[])
    assert [release.reason for release in seen.releases] == ["superseded"]
    now_kept = world.store.take(key_of())
    assert now_kept is not None
    assert now_kept.handle.tokens == 300


def test_a_newer_turn_supersedes_the_kept_one_and_releases_it(world: World) -> None:
    events = world.request(CHAT, x_conversation_id="c1")
    world.run([*events, *world.response(final(210))])
    # Another branch of the conversation finishes while this one's handle is kept.
    kept(world)
    seen = ask(world, CHAT | {"prompt_logprobs": None}, response=world.response(final(220)))
    assert receipt_of(seen)["outcome"] == "reused"
    kept_now = captured_turn(world)
    assert kept_now.handle.tokens == 220


def test_the_fate_of_the_handle_reaches_the_access_log(world: World) -> None:
    seen = ask(world, response=world.response(final()))
    chunks = [answer for answer in seen.answers if isinstance(answer, ForwardChunk)]
    assert {"captured": "kept"} in [dict(chunk.metadata) for chunk in chunks]
    assert seen.response_headers.metadata["conversation"] == str(key_of())


def test_whole_answers_are_captured_and_stripped(world: World) -> None:
    whole = {"choices": [{"message": {"content": "hi"}, "token_ids": [1]}], "prompt_token_ids": PROMPT}
    body = orjson.dumps(whole | {"kv_transfer_params": handle_params(len(PROMPT))})
    response = world.response(body[:50], body[50:], content_type="application/json; charset=utf-8")
    seen = ask(world, response=response)
    assert orjson.loads(seen.client_body) == {
        "choices": [{"message": {"content": "hi"}, "token_ids": None}],
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }
    assert seen.receipt.captured == "kept"


@pytest.mark.parametrize(
    "response_fields",
    [
        {"status": "500"},
        {"content_type": "text/plain"},
        {"content_encoding": "gzip"},
    ],
)
def test_answers_with_nothing_to_read_are_not_watched(world: World, response_fields: dict[str, str]) -> None:
    seen = ask(world, response=world.response(b"x", **response_fields)[:1])
    assert seen.response_headers.watch is False
    assert "outcome" in receipt_of(seen)


def test_a_response_without_body_is_not_watched(world: World) -> None:
    headers = ResponseHeaders(((":status", "200"),), end_of_stream=True, at=world.now)
    assert ask(world, response=[headers]).response_headers.watch is False


# --- what clients and Envoy may send ------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"a":NaN}', b""])
def test_bad_json_is_refused_in_openai_style(world: World, body: bytes) -> None:
    seen = ask(world, body)
    assert seen.refused.status == 400
    assert orjson.loads(seen.refused.body)["error"]["code"] == "invalid_json"
    assert seen.receipt.reason is Reason.CLIENT_ERROR


def test_hazard_23_a_body_over_the_cap_is_refused(world: World) -> None:
    world.settings = GatewaySettings(request_max_bytes=1000)
    seen = ask(world, CHAT | {"x": "y" * 2000})
    assert seen.refused.status == 413
    assert orjson.loads(seen.refused.body)["error"]["message"] == "The request body is larger than 1000 bytes."


def test_hazard_23_an_announced_oversize_is_refused_before_it_arrives(world: World) -> None:
    world.settings = GatewaySettings(request_max_bytes=1000)
    headers = (*(((":method", "POST"), (":path", "/v1/completions"))), ("content-length", "5000"))
    seen = world.run([RequestHeaders(headers, end_of_stream=False, at=0)])
    assert seen.refused.status == 413


@pytest.mark.parametrize("bound", ["max_requests", "max_preparing_requests"])
def test_overload_is_refused_at_the_headers_with_the_time_to_come_again(world: World, bound: str) -> None:
    world.settings = GatewaySettings(**{bound: 1})
    world.load.requests = world.load.preparing = 1
    seen = ask(world)
    assert seen.refused.status == 503
    assert orjson.loads(seen.refused.body)["error"]["code"] == "overloaded"
    assert header(seen.refused.headers, "retry-after") == "1"
    assert (seen.receipt.outcome, seen.receipt.reason) == (Outcome.REFUSED, Reason.OVERLOADED)
    assert seen.received == 1, "the body was not waited for"
    assert len(world.store) == 1, "and nothing was taken"


def test_bodies_that_exceed_their_bound_together_are_refused(world: World) -> None:
    world.settings = GatewaySettings(request_max_total_bytes=1000)
    world.load.body_bytes = 990
    assert ask(world).receipt.reason is Reason.OVERLOADED
    assert world.load == Load(body_bytes=990)


@pytest.mark.parametrize("leave_at", [*range(12), None])
def test_whatever_happens_the_load_is_given_back(world: World, leave_at: int | None) -> None:
    events = [*world.request(CHAT, x_conversation_id="c1"), *world.response(final(210))]
    world.run(events, leave_at=leave_at)
    assert world.load == Load()


def test_a_request_that_was_sent_to_d_waits_for_its_prefill_no_more(world: World) -> None:
    seen = ask(world)
    length = len(orjson.dumps(CHAT))
    assert seen.loads[Call] == Load(requests=1, preparing=1, body_bytes=length)
    assert seen.loads[ForwardResponseHeaders] == Load(requests=1, preparing=0, body_bytes=length)


def test_our_part_has_a_deadline_beyond_which_d_serves_alone(world: World) -> None:
    world.settings = GatewaySettings(preparation_timeout_seconds=20.0)
    start = world.now

    def render(_: Call) -> LegResult:
        world.now += 15
        return world.answer(200, {"token_ids": PROMPT})

    def parked(_: Call) -> LegResult:
        world.now += 5
        return world.answer(0, b"", error="timeout")

    world.render, world.prefill = render, parked
    seen = ask(world)
    assert [call.timeout_seconds for call in seen.calls] == [5.0, 5.0], "render, then what is left; no cold leg"
    assert world.now == start + 20
    assert (receipt_of(seen)["outcome"], receipt_of(seen)["reason"]) == ("decode_only", "prefill_timeout")


def test_an_absurd_content_length_is_too_large(world: World) -> None:
    headers = ((":method", "POST"), (":path", "/v1/completions"), ("content-length", "9" * 5000))
    assert world.run([RequestHeaders(headers, end_of_stream=False, at=0)]).refused.status == 413


def test_identity_is_no_encoding_in_any_case(world: World) -> None:
    assert receipt_of(ask(world, content_encoding="Identity"))["outcome"] == "reused"


def test_a_compressed_request_is_refused_rather_than_passed_unread(world: World) -> None:
    assert ask(world, content_encoding="gzip").refused.status == 415


def test_hazard_10_forbidden_fields_are_removed_and_counted(world: World) -> None:
    body = orjson.dumps(CHAT)[:-1] + b',"kv_transfer_params":{"remote_host":"evil"}}'
    seen = ask(world, body)
    assert seen.receipt.forbidden_fields_removed == 1
    assert all(b"evil" not in call.body for call in seen.calls)
    assert b"evil" not in (seen.forwarded.body or b"")
    assert seen.response_headers.metadata["forbidden_fields_removed"] == 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/embeddings")])
def test_hazard_31_48_what_is_not_ours_passes_untouched(world: World, method: str, path: str) -> None:
    events = [*world.request(b"anything", path=path, method=method), *world.response(b"abc", content_type="x/y")]
    seen = world.run(events)
    assert seen.forwarded == ForwardRequest(b"anything")
    assert seen.response_headers == ForwardResponseHeaders(watch=False)
    assert seen.client_body == b"abc"
    assert seen.receipt.outcome is Outcome.PASSED


def test_hazard_31_a_request_without_body_passes(world: World) -> None:
    opening = RequestHeaders(((":method", "POST"), (":path", "/v1/completions")), end_of_stream=True, at=0)
    seen = world.run([opening, *world.response(b"x")])
    assert seen.forwarded == ForwardRequest(None)


def test_request_trailers_end_a_request(world: World) -> None:
    opening, first, last = world.request(CHAT, x_conversation_id="c1")
    assert isinstance(last, RequestBody)
    unfinished = RequestBody(last.data, end_of_stream=False, at=last.at)
    seen = world.run([opening, first, unfinished, RequestTrailers(world.now), *world.response(final())])
    assert seen.forwarded.had_trailers
    assert receipt_of(seen)["outcome"] == "reused"


def test_a_repeated_end_of_the_request_is_not_answered(world: World) -> None:
    again = RequestBody(b"", end_of_stream=True, at=world.now)
    seen = ask(world, response=[again, *world.response(final())])
    assert [type(answer) for answer in seen.answers[:2]] == [ForwardRequest, ForwardResponseHeaders]


def test_a_reply_by_an_earlier_filter_passes(world: World) -> None:
    seen = world.run(world.response(b"denied", status="403"))
    assert [type(answer) for answer in seen.answers] == [ForwardResponseHeaders, ForwardChunk, ForwardChunk]
    assert seen.client_body == b"denied"


def test_a_reply_by_an_earlier_filter_may_end_with_trailers(world: World) -> None:
    seen = world.run([*world.response(b"denied", status="403")[:-1], ResponseTrailers(world.now)])
    assert [type(answer) for answer in seen.answers] == [ForwardResponseHeaders, ForwardChunk, ForwardTrailers]


def test_response_trailers_end_a_watched_response(world: World) -> None:
    seen = ask(world, response=[*world.response(final())[:-1], ResponseTrailers(world.now)])
    assert isinstance(seen.answers[-1], ForwardTrailers)


def test_envoy_s_own_answer_to_a_stalled_upload_passes(world: World) -> None:
    request = world.request(CHAT, x_conversation_id="c1")[:2]
    seen = world.run([*request, *world.response(b"{}", status="408", content_type="application/json")])
    assert seen.response_headers == ForwardResponseHeaders(watch=False)
    assert seen.client_body == b"{}"
    assert len(world.store) == 1


def test_hazard_31_trailers_cannot_end_a_held_answer_unnoticed(world: World) -> None:
    for response in (world.response(b'{"a":', content_type="application/json"), world.response(b"data: {")):
        with pytest.raises(EnvoyProtocolError):
            ask(world, response=[*response[:-1], ResponseTrailers(world.now)])


@pytest.mark.parametrize("misplaced", ["request", "response", "passed", "headers"])
def test_messages_out_of_order_abort_the_stream(world: World, misplaced: str) -> None:
    request, response = world.request(CHAT, x_conversation_id="c1"), world.response(b"x")
    events = {
        "request": [request[0], request[0]],
        "response": [*request, response[0], request[0]],
        "passed": [response[0], request[0]],
        "headers": [*request, response[1]],
    }[misplaced]
    with pytest.raises(EnvoyProtocolError):
        world.run(events)


# --- the client leaves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_at", range(1, 12))
def test_hazard_16_28_leaving_at_any_point_loses_no_handle_silently(world: World, leave_at: int) -> None:
    """A taken handle is sent to P or released; one never taken stays. Nothing is stored of a half-seen turn."""
    seen = world.run([*world.request(CHAT, x_conversation_id="c1"), *world.response(final(210))], leave_at=leave_at)
    sent = sum("remote_engine_id" in body["kv_transfer_params"] for body in seen.leg_bodies(Leg.PREFILL))
    released = sum(release.after_seconds == 0 for release in seen.releases)
    still_kept = len(world.store) - (seen.receipt.captured == "kept")
    assert sent + released + still_kept == 1
    # Sent and perhaps not read: D is told later.
    in_doubt = [release.reason for release in seen.releases if release.after_seconds]
    assert in_doubt == (["abandoned"] if seen.receipt.abandoned is Stage.PREFILL else [])


def test_hazard_15_16_how_far_a_request_had_come_is_known_when_its_client_leaves(world: World) -> None:
    stages = []
    for leave_at in range(11):
        kept(world)
        events = [*world.request(CHAT, x_conversation_id="c1"), *world.response(b": 1\n\n")]
        stages.append(world.run(events, leave_at=leave_at).receipt.abandoned)
    assert [stage for stage, _ in itertools.groupby(stages)] == [*Stage]


@pytest.mark.parametrize("cut", range(6))
def test_hazard_28_envoy_may_close_the_stream_anywhere(world: World, cut: int) -> None:
    events = [*world.request(CHAT, x_conversation_id="c1"), *world.response(final(210))][:cut]
    seen = world.run([*events, Ended(world.now)])
    assert not any(isinstance(answer, Reply) for answer in seen.answers)


@given(cuts=st.lists(st.integers(0, 400), max_size=8), pieces=st.lists(st.integers(0, 4000), max_size=8))
def test_cutting_request_and_response_differently_changes_nothing(cuts: list[int], pieces: list[int]) -> None:
    def run(body_cuts: list[int], response_cuts: list[int]) -> tuple[bytes, bytes | None, Any]:
        world = World(prefill=lambda _: prefilled(world, remote_prefill_cached_tokens=200))
        world.render = lambda _: world.answer(200, {"token_ids": PROMPT})
        kept(world)
        opening = world.request(CHAT, x_conversation_id="c1")[0]
        now = world.now
        request = [RequestBody(p, end_of_stream=False, at=now) for p in split(orjson.dumps(CHAT), body_cuts)]
        response = [ResponseBody(p, end_of_stream=False, at=now) for p in split(final(210), response_cuts)]
        headers, end = world.response()[0], world.response()[-1]
        request_end = RequestBody(b"", end_of_stream=True, at=now)
        seen = world.run([opening, *request, request_end, headers, *response, end])
        return seen.client_body, seen.forwarded.body, captured_turn(world).handle.raw

    assert run(cuts, pieces) == run([], [])


def split(text: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(at)]


# --- the time to the first token ------------------------------------------------------------------------------------


def stream_after(world: World, seconds: float, *chunks: bytes, **response: Any) -> Seen:
    """A turn whose answer begins so long after its request, and ends long after that."""
    events = world.request(CHAT, x_conversation_id="c1")
    world.now += seconds
    answer = world.response(*chunks, **response)
    world.now += 100
    return world.run([*events, *answer[:-1], dataclasses.replace(answer[-1], at=world.now)])


def test_the_first_piece_of_a_stream_stops_the_clock(world) -> None:
    seen = stream_after(world, 3.0, sse({"choices": []}), sse({"choices": []}))
    assert seen.receipt.ttft_ms == pytest.approx(3000)
    assert seen.receipt.decode_ms is not None
    assert seen.receipt.decode_ms <= 3000


def test_an_answer_in_one_piece_has_no_first_token(world) -> None:
    seen = stream_after(world, 3.0, b"{}", content_type="application/json")
    assert (seen.receipt.ttft_ms, seen.receipt.decode_ms) == (None, None)
