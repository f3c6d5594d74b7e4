"""The harness itself: a gateway of real parts serves, reuses, and tells when something goes wrong."""

from __future__ import annotations

from gateway_harness import worker

from workers.sim.text import WORDS

DOCUMENT = "".join(WORDS[1000:1300])


def test_a_conversation_is_reused_turn_after_turn_and_says_what_right_kv_says(gateway) -> None:
    chat = gateway.new_chat()
    first = chat.say(DOCUMENT)
    assert (first.status, first.outcome, first.reason) == (200, "cold", "nothing_kept")
    assert first.text == gateway.right_text(chat.messages[:1])
    for _ in range(3):
        held = len(chat.messages)
        answer = chat.say("And then?")
        assert answer.outcome == "reused", answer.receipt
        assert answer.receipt["reused"] > 300
        assert answer.text == gateway.right_text(chat.messages[: held + 1])
    report = gateway.report()
    assert report["handles_read"] == 3
    assert report["tokenisations"] == 4


def test_completions_are_served_both_ways(gateway) -> None:
    options = {"max_tokens": 12, "ignore_eos": True}
    streamed = gateway.completions("c-1", DOCUMENT, **options)
    whole = gateway.completions("c-2", DOCUMENT, stream=False, **options)
    assert streamed.text == whole.text == gateway.right_completion(DOCUMENT, **options)
    assert streamed.is_done
    assert whole.finish_reason == "length"


def test_an_edited_history_gets_the_right_answer(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages[0]["content"] = DOCUMENT.replace(WORDS[1150], WORDS[7])
    answer = chat.say("And then?")
    assert answer.outcome == "partial", answer.receipt
    assert answer.text == gateway.right_text(chat.messages[:3])


def test_a_broken_stream_is_told_apart_from_a_whole_one(gateway) -> None:
    chat = gateway.new_chat()
    for decode in gateway.fleet.decode:
        gateway.fleet.strike(decode, "truncate", after_events=3, seconds=0.5)
    answer = chat.say(DOCUMENT)
    assert answer.broken
    assert not answer.is_done
    assert len(answer.events) == 3


def test_a_gateway_of_ones_own_takes_other_workers_settings_and_replicas(start_gateway) -> None:
    gateway = start_gateway(
        prefill=[worker("prefill")],
        decode=[worker("decode", streams_handles=False, digests_handles=False)],
        replicas=2,
        extproc_env={"KVLOOP_REUSE": "false"},
    )
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    answer = chat.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "reuse_off")


def test_parts_can_be_taken_down_and_brought_back(start_gateway) -> None:
    gateway = start_gateway()
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    gateway.restart_extproc()
    gateway.crash_worker(gateway.fleet.decode[0])
    gateway.start_worker(gateway.fleet.decode[0])
    answer = chat.say("And then?")
    assert (answer.status, answer.outcome, answer.reason) == (200, "cold", "nothing_kept")
    assert answer.text == gateway.right_text(chat.messages[:3])


def test_what_workers_received_is_kept_leg_by_leg(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT, temperature=0.5)
    (prefilled,) = gateway.received("prefill", leg="prefill")
    (decoded,) = gateway.received("decode", path="/v1/chat/completions")
    assert (prefilled.json["max_tokens"], prefilled.json["stream"]) == (1, False)
    assert (decoded.json["temperature"], decoded.json["stream"]) == (0.5, True)
    assert prefilled.at < decoded.at


def test_a_client_may_leave(gateway) -> None:
    chat = gateway.new_chat()
    for decode in gateway.fleet.decode:
        gateway.fleet.strike(decode, "stall")
    gateway.abandon(
        chat.conversation, [{"role": "user", "content": DOCUMENT}], lambda: gateway.report()["faults_struck"]
    )
    gateway.until(lambda: not gateway.report()["running"])
