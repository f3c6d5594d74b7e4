"""Letting go: each way in which a conversation can end frees what the decode workers retained for it."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import orjson
import pytest
from gateway_harness import worker

from workers.sim.faults import Fault, Kind

DOCUMENT = "The harbour master wrote down every ship that came in. " * 12


def retained(gateway: Any) -> int:
    return sum(each["live_pins"] for each in gateway.report()["workers"])


def delete(gateway: Any, path: str, **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.extproc_admin_port(), timeout=30)) as connection:
        connection.request("DELETE", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, orjson.loads(body) if response.status == 200 else body.decode()


def test_a_conversation_the_client_ends_is_served_and_leaves_nothing(start_gateway) -> None:
    gateway = start_gateway()
    chat = gateway.new_chat()
    assert chat.say(DOCUMENT).status == 200
    assert retained(gateway) == 1
    last = chat.say("Good bye.", headers={"x-kvloop-end": "true"})
    assert (last.status, last.outcome, last.is_done) == (200, "reused", True)
    gateway.until(lambda: retained(gateway) == 0, "the last turn's blocks are free")
    assert not [each for each in gateway.received("decode") if "x-kvloop-end" in each.headers]


def test_a_conversation_can_be_ended_on_the_admin_port_by_id_or_by_hash(start_gateway) -> None:
    gateway = start_gateway()
    for by_hash in (False, True):
        chat = gateway.new_chat()
        chat.say(DOCUMENT, tenant="a")
        path = f"/conversations/{chat.conversation}?model=sim"
        status, of_another = delete(gateway, path, authorization="Bearer b")
        assert (status, of_another["released"]) == (200, False)
        if by_hash:
            path = f"/conversations/{received_key(gateway)}"
        status, body = delete(gateway, path, authorization="Bearer a")
        assert (status, body["released"]) == (200, True)
        gateway.until(lambda: retained(gateway) == 0, "the ended conversation's blocks are free")
        again = chat.say("Are you still there?", tenant="a")
        assert (again.outcome, again.reason) == ("cold", "nothing_kept")
        delete(gateway, f"/conversations/{chat.conversation}?model=sim", authorization="Bearer a")
        gateway.until(lambda: retained(gateway) == 0)


def received_key(gateway: Any) -> str:
    """The hash of the newest turn's conversation, as the decode leg carries it and the access log shows it."""
    return str(gateway.received("decode", path="/v1/chat/completions")[-1].headers["x-kvloop-conversation"])


def test_a_name_that_is_neither_is_a_bad_request(gateway) -> None:
    status, text = delete(gateway, "/conversations/not-a-hash")
    assert status == 400
    assert "?model=" in text


def test_a_decode_worker_about_to_stop_is_let_go_of(start_gateway) -> None:
    gateway = start_gateway()
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    (engine,) = {each["engine_id"] for each in gateway.report()["workers"] if each["role"] == "decode"}
    assert delete(gateway, f"/engines/{engine}") == (200, {"released": {engine: 1}})
    assert delete(gateway, "/engines/unheard-of") == (200, {"released": {}})
    gateway.until(lambda: retained(gateway) == 0, "the draining worker's blocks are free")
    assert chat.say("Go on.").reason == "nothing_kept"
    gateway.until(lambda: retained(gateway) == 0, "nothing new is kept on it")


def test_a_request_p_refuses_costs_the_corrected_one_nothing(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    wrong = gateway.chat(chat.conversation, [*chat.messages, {"content": "And the next day?"}])
    assert wrong.status == 400
    right = chat.say("And the next day?")
    assert (right.status, right.outcome) == (200, "reused")


def test_hazard_17_two_hundred_one_turn_chats_do_not_stop_a_small_decode_worker(start_gateway) -> None:
    """Each pins about a tenth of its memory: without a budget the eleventh would wait for D's TTL, 480 s."""
    gateway = start_gateway(
        decode=[worker("decode", engine={"block_count": 128, "max_model_len": 1024})],
        extproc_env={"KVLOOP_RETAIN_REFRESH_SECONDS": "0.2"},
    )

    def ask(number: int) -> Any:
        return gateway.new_chat(max_tokens=8).say(f"{number} {DOCUMENT}"[:200])

    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, range(200)))
    assert [answer.status for answer in answers if not answer.is_done] == []
    gateway.until(lambda: gateway.report()["retained_tokens"] <= 0.5 * 128 * 16, "half of the memory is free")
    assert 'kvloop_releases_total{reason="over_budget",result="freed"}' in gateway.metrics()


# --- eager return ----------------------------------------------------------------------------------------------------

EAGER = {"KVLOOP_RETURN_MODE": "eager", "KVLOOP_DECODE_BLOCK_SIZE_TOKENS": "16"}
CACHING = {"engine": {"prefix_caching": True}}


def returned(gateway: Any) -> int:
    """How many early returns have succeeded."""
    (line,) = (
        line for line in gateway.metrics().splitlines() if line.startswith('kvloop_returns_total{result="returned"')
    )
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("digests", [True, False])
def test_with_eager_return_d_is_free_at_once_and_the_next_turn_is_a_local_hit(start_gateway, *, digests: bool) -> None:
    gateway = start_gateway(
        prefill=[worker("prefill", **CACHING)] * 2,
        decode=[worker("decode", digests_handles=digests)],
        extproc_env=EAGER,
    )
    chat = gateway.new_chat()
    for turn in range(1, 4):
        question = f"{DOCUMENT} And on day {turn}?"
        answer = chat.say(question)
        assert answer.text == gateway.right_text(chat.messages[:-1])
        gateway.until(lambda turn=turn: returned(gateway) == turn, "the turn is back on P")
        assert retained(gateway) == 0
        if turn > 1:
            assert answer.outcome == "local"
            assert answer.receipt["reused"] > 64
            assert "token_ids" not in answer.told()
    prefills = gateway.received("prefill", leg="prefill")
    assert not [each for each in prefills if "remote_block_ids" in each.json["kv_transfer_params"]]
    homes = [each for each in gateway.fleet.prefill if any(got.leg in {"return", "prefill"} for got in each.received)]
    assert len(homes) == 1
    assert gateway.received("prefill", leg="render") == []


def test_a_rewritten_history_after_an_early_return_claims_only_what_is_the_same(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill", **CACHING)], extproc_env=EAGER)
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    gateway.until(lambda: returned(gateway) == 1)
    chat.messages[0]["content"] = "Something else altogether. " * 20
    answer = chat.say("Go on.")
    assert (answer.outcome, answer.reason) == ("cold", "return_lost")
    assert answer.text == gateway.right_text(chat.messages[:-1])


def test_an_early_return_that_fails_costs_a_cold_turn_and_nothing_else(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill", **CACHING)], extproc_env=EAGER)
    chat = gateway.new_chat()
    gateway.fleet.call(lambda: gateway.fleet.prefill[0].faults.add(Fault(kind=Kind.STATUS, leg="return", times=1)))
    chat.say(DOCUMENT)
    gateway.until(lambda: 'kvloop_returns_total{result="failed"} 1.0' in gateway.metrics())
    answer = chat.say("Go on.")
    assert answer.status == 200
    assert answer.text == gateway.right_text(chat.messages[:-1])


# --- affinity --------------------------------------------------------------------------------------------------------


def test_a_conversation_s_prefills_go_to_its_own_p_and_elsewhere_while_that_is_down(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill")] * 3)
    chat = gateway.new_chat(max_tokens=8)
    for _ in range(4):
        assert chat.say(DOCUMENT).status == 200
    (home,) = [each for each in gateway.fleet.prefill if any(got.leg == "prefill" for got in each.received)]
    gateway.crash_worker(home)
    healthy = "cluster.prefill_by_conversation.membership_healthy"
    gateway.until(lambda: gateway.envoy_stats(healthy)[healthy] == 2, "Envoy has missed the crashed P")
    answer = chat.say("And then?")
    assert (answer.status, answer.outcome) == (200, "reused")
    gateway.start_worker(home)


def test_different_conversations_have_different_ps(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill")] * 3)
    for _ in range(24):
        assert gateway.new_chat(max_tokens=4).say("Hello.").status == 200
    assert len([each for each in gateway.fleet.prefill if any(got.leg == "prefill" for got in each.received)]) == 3
