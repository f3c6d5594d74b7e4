"""The gateway between real Envoy and simulated workers, which notice every wrong use of KV (see ``conftest.check``)."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gateway_harness import worker

from workers.sim.faults import Fault, Kind
from workers.sim.settings import Timing
from workers.sim.text import WORDS, Model

DOCUMENT = "".join(WORDS[1000:1300])
MEBIBYTE = 1024 * 1024


def strike(gateway, workers: list[Any], **fault: Any) -> None:
    gateway.fleet.call(lambda: [each.faults.add(Fault(**fault)) for each in workers])


def legs(gateway, *names: str) -> list[Any]:
    """Requests the prefill workers got as one of these legs, parsed, in order of arrival at each worker."""
    return [r.json for each in gateway.fleet.prefill for r in each.received if r.leg in names]


def pins_are_gone(gateway) -> bool:
    return gateway.report()["live_pins"] == 0


# --- the receipt --------------------------------------------------------------------------------------------------------


def test_the_receipt_reaches_client_access_log_and_counters(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    answer = chat.say("And then?")
    assert answer.receipt["outcome"] == "reused"
    assert answer.receipt["reused"] == answer.receipt["held"] < answer.receipt["prompt"]
    assert {"render_ms", "prefill_ms"} <= answer.receipt.keys()
    line = gateway.until(lambda: next((x for x in gateway.access_log() if "reused" in json.dumps(x)), None))
    logged = json.dumps(line)
    assert '"captured": "kept"' in logged
    assert chat.conversation not in logged
    assert WORDS[1000] not in logged
    assert 'kvloop_turns_total{outcome="reused",reason=""}' in gateway.metrics()


def test_each_turn_is_tokenised_once(gateway) -> None:
    chat = gateway.new_chat()
    for _ in range(4):
        chat.say(DOCUMENT)
    assert gateway.report()["tokenisations"] == 4


# --- what goes through --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32_769, MEBIBYTE + 1, 4 * MEBIBYTE + 1, 20 * MEBIBYTE])
def test_hazard_23_26_large_bodies_pass_once_and_whole(gateway, size: int) -> None:
    answer = gateway.chat(None, [{"role": "user", "content": "hi"}], x_padding="p" * size)
    assert answer.status == 200
    bodies = [r for each in gateway.fleet.workers for r in each.received if r.path == "/v1/chat/completions"]
    assert len(bodies) == 2, "one prefill leg, one decode leg"
    assert [r.json["x_padding"] == "p" * size for r in bodies] == [True, True]


def test_hazard_23_above_the_cap_is_413_in_openai_style(start_gateway) -> None:
    gateway = start_gateway(extproc_env={"KVLOOP_REQUEST_MAX_BYTES": str(MEBIBYTE)})
    answer = gateway.chat(None, [{"role": "user", "content": "hi"}], x_padding="p" * MEBIBYTE)
    assert answer.status == 413
    assert answer.json["error"]["code"] == "request_too_large"
    assert answer.receipt == {"outcome": "refused", "reason": "client_error"}
    assert gateway.chat(None, [{"role": "user", "content": "hi"}]).status == 200


def test_hazard_30_a_large_whole_answer_comes_back_as_it_left(gateway) -> None:
    options = {"max_tokens": 3000, "ignore_eos": True, "stream": False, "logprobs": True, "top_logprobs": 5}
    through = gateway.chat("c-large", [{"role": "user", "content": DOCUMENT}], **options)
    alone = gateway.chat(None, [{"role": "user", "content": DOCUMENT}], prompt_logprobs=0, **options)
    assert len(through.raw) > 200_000
    assert through.json["choices"] == alone.json["choices"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_hazard_31_other_methods_get_the_worker_s_own_answer(gateway, method: str) -> None:
    answer = gateway.request(method, "/v1/chat/completions", b"" if method == "PUT" else None)
    assert answer.status in {404, 405}


def test_hazard_31_an_empty_post_is_refused_in_openai_style(gateway) -> None:
    answer = gateway.request("POST", "/v1/chat/completions", b"", {"content-type": "application/json"})
    assert answer.status in {400, 411, 422}


def test_hazard_31_expect_100_continue_is_served(gateway) -> None:
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = gateway.post("/v1/chat/completions", body, headers={"expect": "100-continue"})
    assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_hazard_48_other_paths_pass_without_ext_proc(gateway, path: str) -> None:
    before = gateway.envoy_stats("http.main.ext_proc")
    answer = gateway.request("GET", path)
    assert answer.status == 200
    assert "x-kvloop-receipt" not in answer.headers
    assert gateway.envoy_stats("http.main.ext_proc") == before


# --- cost where there is nothing to do -----------------------------------------------------------------------------------


def ext_proc_messages(gateway) -> int:
    stats = gateway.envoy_stats("http.")
    return sum(value for name, value in stats.items() if name.endswith("stream_msgs_sent"))


def test_an_answer_with_nothing_to_capture_sends_no_message_after_its_headers(gateway) -> None:
    options = {"n": 2, "temperature": 0.8, "max_tokens": 50, "ignore_eos": True}
    before = ext_proc_messages(gateway)
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}], **options)
    assert len(answer.events) > 50
    # Request headers, one or two body pieces, response headers.
    assert ext_proc_messages(gateway) - before <= 4


# --- chunks pass as they come --------------------------------------------------------------------------------------------


def test_hazard_20_events_reach_the_client_before_the_next_ones_exist(start_gateway) -> None:
    slow = Timing(decode_tokens_per_second=10)
    gateway = start_gateway(decode=[worker("decode", timing=slow)])
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}], max_tokens=10, ignore_eos=True)
    arrivals = [at for at, piece in answer.pieces if b'"content":' in piece]
    # Held back to the end, they would all arrive together.
    assert arrivals[-1] - arrivals[0] > 0.5
    assert len(answer.pieces) >= 9


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("digest", [True, False], ids=["digest", "token_ids"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_every_kind_of_d_closes_the_loop(start_gateway, version: Any, digest: bool, stream: bool) -> None:
    d = worker("decode", vllm_version=version, streams_handles=version == "0.32.0", digests_handles=digest)
    gateway = start_gateway(decode=[d])
    chat = gateway.new_chat(stream=stream)
    chat.say(DOCUMENT)
    if not digest:
        # A D without the plugin is asked for it in the background.
        gateway.until(lambda: gateway.debug_state()["engines"][0]["block_size_tokens"], "the block size is known")
    for _ in range(3):
        answer = chat.say("And then?")
        assert answer.outcome == "reused", answer.receipt
        assert answer.text == gateway.right_text(chat.messages[:-1])
        assert not {"remote_block_ids", "kvloop_digest"} & answer.told()
        assert b'token_ids":[' not in answer.raw


def test_hazard_33_a_d_that_never_streams_handles_is_served_cold(start_gateway) -> None:
    gateway = start_gateway(decode=[worker("decode", streams_handles=False, digests_handles=False)])
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    answer = chat.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")


# --- wrong KV is not to be had -------------------------------------------------------------------------------------------

EDITS: dict[str, Any] = {
    "first_word": lambda m: m[0].update(content=WORDS[5] + m[0]["content"][len(WORDS[1000]) :]),
    "middle": lambda m: m[0].update(content=m[0]["content"].replace(WORDS[1150], "")),
    "truncated": lambda m: m[0].update(content="".join(WORDS[1000:1200])),
    "answer": lambda m: m[1].update(content="nothing"),
    "answer_dropped": lambda m: m.pop(1),
    "regenerated": lambda m: m.__delitem__(slice(1, None)),
    "inserted": lambda m: m.insert(0, {"role": "system", "content": "be brief"}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_hazard_01_04_05_an_edited_history_is_answered_right(gateway, edit: str) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append({"role": "user", "content": "And then?"})
    EDITS[edit](chat.messages)
    answer = chat.again()
    assert answer.text == gateway.right_text(chat.messages)
    assert answer.outcome in {"partial", "cold"}


def test_hazard_08_two_chats_with_one_id_both_get_right_answers(gateway) -> None:
    one, two = gateway.new_chat(), gateway.new_chat()
    two.conversation = one.conversation
    for turn in range(3):
        for chat, start in ((one, 1000), (two, 1400)):
            answer = chat.say("".join(WORDS[start + 100 * turn : start + 100 * turn + 100]))
            assert answer.text == gateway.right_text(chat.messages[:-1])


def test_hazard_07_many_equal_turns_at_once_use_the_handle_once(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append({"role": "user", "content": "And then?"})
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat.again(), range(8)))
    assert {answer.text for answer in answers} == {gateway.right_text(chat.messages)}
    assert sum(answer.outcome == "reused" for answer in answers) == 1
    assert gateway.report()["handles_read"] <= 8


def test_hazard_02_a_template_that_rewrites_history_is_caught(start_gateway) -> None:
    model = Model(thinks=True)
    gateway = start_gateway(prefill=[worker("prefill", model=model)], decode=[worker("decode", model=model)])
    chat = gateway.new_chat()
    assert "<think>" in chat.say(DOCUMENT).text
    for _ in range(3):
        answer = chat.say("And then?")
        assert answer.outcome == "partial"
        assert answer.text == gateway.right_text(chat.messages[:-1])


def test_hazard_03_text_that_tokenises_differently_is_caught(start_gateway) -> None:
    model = Model(emits_pairs=True)
    gateway = start_gateway(prefill=[worker("prefill", model=model)], decode=[worker("decode", model=model)])
    chat = gateway.new_chat()
    for _ in range(4):
        answer = chat.say(DOCUMENT)
        assert answer.text == gateway.right_text(chat.messages[:-1])


# --- nothing gets in, nothing leaks --------------------------------------------------------------------------------------


def test_hazard_10_no_worker_ever_sees_a_client_s_transfer_parameters(gateway) -> None:
    body = (
        '{"model":"sim","messages":[{"role":"user","content":"hi"}],"kv_transfer_params":{"remote_host":"evil"},'
        '"kv_transfer_params":{"remote_host":"evil"},"ec_transfer_params":{"x":"evil"},'
        '"\\u006bv_transfer_params":{"remote_host":"evil"},"vllm_xargs":{"kv_transfer_params":"evil","keep":1}}'
    )
    assert gateway.post("/v1/chat/completions", body.encode()).status == 200
    seen = [r.body for each in gateway.fleet.workers for r in each.received if r.path == "/v1/chat/completions"]
    assert len(seen) == 2
    assert not [body for body in seen if b"evil" in body]
    assert all(json.loads(body)["vllm_xargs"] == {"keep": 1} for body in seen)


def test_hazard_42_steering_headers_of_clients_are_dropped(gateway) -> None:
    headers = {"x-kvloop-secret": "guess", "x-kvloop-conversation": "mine", "x-data-parallel-rank": "3"}
    assert gateway.chat(None, [{"role": "user", "content": "hi"}], headers=headers).status == 200
    for received in (r for each in gateway.fleet.workers for r in each.received if r.path.startswith("/v1/chat")):
        assert received.headers.get("x-kvloop-secret") == gateway.secret
        assert "x-kvloop-conversation" not in received.headers
        assert "x-data-parallel-rank" not in received.headers


def test_hazard_09_logs_hold_no_prompt_no_answer_no_id(start_gateway) -> None:
    gateway = start_gateway()
    chat = gateway.new_chat()
    answer = chat.say(DOCUMENT, tenant="the-tenant-s-token")
    gateway.stop_extproc()
    logs = gateway.logs()
    for secret in (WORDS[1000] + WORDS[1001], answer.text, chat.conversation, "the-tenant-s-token", gateway.secret):
        assert secret not in logs


# --- the ladder on real connections ---------------------------------------------------------------------------------------


def test_hazard_18_a_failing_leg_with_a_handle_costs_one_cold_retry(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    strike(gateway, gateway.fleet.prefill, kind=Kind.STATUS, status=500, leg="prefill", with_handle=True)
    answer = chat.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "prefill_failed")
    assert answer.text == gateway.right_text(chat.messages[:-1])


def test_hazard_14_a_parked_leg_is_given_up(start_gateway) -> None:
    gateway = start_gateway(extproc_env={"KVLOOP_REUSE_TIMEOUT_SECONDS": "0.5"})
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    strike(gateway, gateway.fleet.prefill, kind=Kind.STALL, leg="prefill", with_handle=True)
    answer = chat.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "prefill_timeout")
    assert answer.text == gateway.right_text(chat.messages[:-1])


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.RESET])
def test_without_p_the_turn_is_served_by_d_and_the_next_one_reuses(gateway, kind: Kind) -> None:
    gateway.new_chat().say("hello")  # so that the gateway knows what D can do
    chat = gateway.new_chat()
    strike(gateway, gateway.fleet.prefill, kind=kind, leg="prefill")
    first = chat.say(DOCUMENT)
    assert first.outcome == "decode_only"
    assert first.text == gateway.right_text(chat.messages[:1])
    gateway.fleet.call(lambda: [each.clear_faults() for each in gateway.fleet.prefill])
    assert chat.say("And then?").outcome == "reused"


def test_p_s_client_error_is_passed_on_and_no_decode_leg_follows(gateway) -> None:
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}], model="nobody")
    assert answer.status == 404
    assert answer.json["error"]["type"] == "NotFoundError"
    assert not [r for each in gateway.fleet.decode for r in each.received if r.path.startswith("/v1/chat")]


def test_with_every_d_down_the_client_gets_an_honest_503(start_gateway) -> None:
    gateway = start_gateway()
    gateway.crash_worker(gateway.fleet.decode[0])
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}])
    assert answer.status == 503
    assert answer.json["error"]["message"]
    assert "retry-after" in answer.headers
    gateway.start_worker(gateway.fleet.decode[0])
    assert gateway.chat("c", [{"role": "user", "content": "hi"}]).status == 200


def test_hazard_25_a_d_that_resets_gets_the_request_once(gateway) -> None:
    strike(gateway, gateway.fleet.decode, kind=Kind.RESET, path="/v1/chat", times=1)
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}])
    assert answer.status == 503
    assert sum(r.path == "/v1/chat/completions" for each in gateway.fleet.decode for r in each.received) == 1


def test_hazard_29_without_ext_proc_nothing_passes_unseen(start_gateway) -> None:
    gateway = start_gateway()
    gateway.kill_extproc()
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}], kv_transfer_params={"remote_host": "evil"})
    assert answer.status == 503
    assert answer.json["error"]["message"]
    assert not [r for each in gateway.fleet.workers for r in each.received if r.path.startswith("/v1/chat")]


def test_a_killed_replica_costs_no_new_request(start_gateway) -> None:
    gateway = start_gateway(replicas=2)
    gateway.kill_extproc(0)
    answers = [gateway.chat(f"c{at}", [{"role": "user", "content": "hi"}]) for at in range(20)]
    assert [answer.status for answer in answers] == [200] * 20


# --- clients leave ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_seconds", [0.0, 0.02, 0.1, 0.3])
def test_hazard_15_16_a_client_that_leaves_strands_nothing(start_gateway, after_seconds: float) -> None:
    slow = Timing(prefill_tokens_per_second=4000, decode_tokens_per_second=50)
    gateway = start_gateway(
        prefill=[worker("prefill", timing=slow)],
        decode=[worker("decode", timing=slow)],
    )
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append({"role": "user", "content": "And then?"})
    body = json.dumps(
        {"model": "sim", "messages": chat.messages, "stream": True, "max_tokens": 500, "ignore_eos": True}
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-conversation-id: {chat.conversation}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall((head + body).encode())
        time.sleep(after_seconds)
    gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics(), "the abandoned request has ended")
    answer = chat.again()
    assert answer.status == 200
    assert answer.text == gateway.right_text(chat.messages)


def test_drain_finishes_running_answers_and_releases_what_is_kept(start_gateway) -> None:
    slow = Timing(decode_tokens_per_second=40)
    gateway = start_gateway(decode=[worker("decode", timing=slow)], extproc_env={"KVLOOP_DRAIN_SECONDS": "20"})
    for _ in range(3):
        gateway.new_chat().say(DOCUMENT, max_tokens=5)
    assert gateway.report()["live_pins"] > 0
    answers: list[Any] = []
    client = threading.Thread(
        target=lambda: answers.append(gateway.new_chat().say(DOCUMENT, max_tokens=40, ignore_eos=True))
    )
    client.start()
    gateway.until(lambda: "kvloop_live_requests 1.0" in gateway.metrics())
    time.sleep(0.2)
    gateway.stop_extproc()
    client.join()
    assert answers[0].is_done
    gateway.until(lambda: pins_are_gone(gateway), "every kept handle was released")


def test_a_turn_nobody_will_continue_frees_d_at_once(start_gateway) -> None:
    gateway = start_gateway()
    gateway.chat(None, [{"role": "user", "content": DOCUMENT}])
    gateway.until(lambda: legs(gateway, "release"), "the handle was released")
    gateway.until(lambda: pins_are_gone(gateway), "a turn without conversation pins nothing")


def test_hazard_13_a_restarted_d_is_forgotten_as_soon_as_it_speaks(start_gateway) -> None:
    gateway = start_gateway()
    old, new = gateway.new_chat(), gateway.new_chat()
    old.say(DOCUMENT)
    d = gateway.fleet.decode[0]
    gateway.fleet.run(d.restart())
    gateway.wait_until_routable()
    new.say(DOCUMENT)
    answer = old.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")
    assert answer.text == gateway.right_text(old.messages[:-1])


def test_hazard_06_expiry_frees_the_store_and_d(start_gateway) -> None:
    gateway = start_gateway(
        extproc_env={
            "KVLOOP_HANDLE_TTL_SECONDS": "2",
            "KVLOOP_HANDLE_MARGIN_SECONDS": "1.5",
            "KVLOOP_REUSE_TIMEOUT_SECONDS": "1",
        },
    )
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    gateway.until(lambda: "kvloop_kept_turns 0.0" in gateway.metrics(), "the handle expired")
    gateway.until(lambda: pins_are_gone(gateway))
    assert chat.say("And then?").reason == "nothing_kept"
