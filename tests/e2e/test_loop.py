"""The loop on real parts: texts and log-probabilities with reuse are those without, and nothing leaks."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import uuid
from typing import Any

import pytest
from loop_client import MODEL, Gateway, Reply

DOCUMENT = "The ferry leaves at nine from the north pier, unless the wind is above six. " * 10
QUESTIONS = ("When does it leave?", "And from where, exactly?", "What if the wind is strong?", "Thank you. In short?")


def fresh() -> str:
    """A conversation id nobody used."""
    return uuid.uuid4().hex


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def play_chat(gateway: Gateway, conversation: str | None, *, stream: bool) -> list[Reply]:
    messages: list[dict[str, str]] = [user(DOCUMENT + QUESTIONS[0])]
    replies = []
    for question in (*QUESTIONS[1:], ""):
        replies.append(gateway.chat(messages, conversation, stream=stream))
        messages += [assistant(replies[-1].text), user(question)]
    return replies


def play_completions(gateway: Gateway, conversation: str | None, *, stream: bool) -> list[Reply]:
    prompt = DOCUMENT
    replies = []
    for question in QUESTIONS:
        prompt += question
        replies.append(gateway.complete(prompt, conversation, stream=stream))
        prompt += replies[-1].text
    return replies


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("play", [play_chat, play_completions])
def test_four_turns_say_the_same_with_reuse_as_without(gateway: Gateway, play: Any, stream: bool) -> None:
    reused, cold = play(gateway, fresh(), stream=stream), play(gateway, None, stream=stream)
    assert [reply.status for reply in reused] == [200] * 4
    assert [reply.text for reply in reused] == [reply.text for reply in cold]
    assert all(len(reply.text) > 0 for reply in reused)
    assert [reply.receipt["outcome"] for reply in reused] == ["cold", "reused", "reused", "reused"]
    assert [reply.receipt.get("reason") for reply in cold] == ["no_conversation"] * 4
    for earlier, later in itertools.pairwise(reused):
        # P reports how much it did not compute: the whole previous sequence, less its last token.
        assert later.receipt["reused"] == later.receipt["held"]
        assert int(later.receipt["reused"]) > int(earlier.receipt["prompt"])


def test_a_conversation_of_token_ids_is_never_tokenised(gateway: Gateway) -> None:
    conversation, prompt = fresh(), [40 + at % 50 for at in range(300)]
    first = gateway.complete(prompt, conversation, return_token_ids=True)
    generated = [token for choice in first.choices for token in choice["token_ids"]]
    second = gateway.complete([*prompt, *generated, 60, 61], conversation)
    assert second.receipt["outcome"] == "reused"
    assert int(second.receipt["reused"]) == len(prompt) + len(generated) - 1
    assert "render_ms" not in second.receipt


# --- history rewritten ----------------------------------------------------------------------------------------------

MIDDLE = len(DOCUMENT) // 2
REWRITES: dict[str, Any] = {
    "first character edited": lambda doc, said: [user("X" + doc[1:]), assistant(said), user("Go on.")],
    "middle removed": lambda doc, said: [user(doc[:300] + doc[400:]), assistant(said), user("Go on.")],
    "truncated": lambda doc, _: [user(doc[:MIDDLE])],
    "regenerated": lambda doc, _: [user(doc)],
    "answer edited": lambda doc, said: [user(doc), assistant("x" + said[1:]), user("Go on.")],
    "answer dropped": lambda doc, _: [user(doc), user("Go on.")],
    "reasoning stripped": lambda doc, said: [user(doc), assistant(said[len(said) // 2 :]), user("Go on.")],
    "replaced": lambda doc, said: [user(doc.upper()), assistant(said), user("Go on.")],
    "system prompt added": lambda doc, _: [{"role": "system", "content": "Be brief."}, user(doc), user("Go on.")],
}
KEEPS_A_BEGINNING = {*REWRITES} - {"first character edited", "replaced", "system prompt added"}


@pytest.mark.parametrize("rewrite", REWRITES)
def test_hazard_01_04_a_rewritten_history_reads_only_what_is_proven(gateway: Gateway, rewrite: str) -> None:
    conversation, scores = fresh(), {"logprobs": True, "top_logprobs": 5}
    said = gateway.chat([user(DOCUMENT)], conversation).text
    history = REWRITES[rewrite](DOCUMENT, said)
    warm, cold = gateway.chat(history, conversation, **scores), gateway.chat(history, **scores)
    assert warm.first_logprobs.keys() == cold.first_logprobs.keys()
    for token, logprob in cold.first_logprobs.items():
        assert warm.first_logprobs[token] == pytest.approx(logprob, abs=1e-3)
    assert warm.text == cold.text
    if rewrite in KEEPS_A_BEGINNING:
        assert warm.receipt["outcome"] == "partial"
        assert int(warm.receipt["reused"]) % 32 == 0
        assert 0 < int(warm.receipt["reused"]) < int(warm.receipt["prompt"])
    else:
        assert (warm.receipt["outcome"], warm.receipt["reason"]) == ("cold", "history_differs")


def test_hazard_02_reasoning_the_template_forgets_is_not_reused(gateway: Gateway) -> None:
    """The client changes nothing, but once a user message follows, the template leaves the older reasoning out."""
    conversation, scores = fresh(), {"logprobs": True, "top_logprobs": 5}
    thought = assistant("<think>" + "The wind is what matters. " * 10 + "</think>At nine.")
    gateway.chat([user(DOCUMENT), thought], conversation)
    history = [user(DOCUMENT), thought, user("Go on.")]
    warm, cold = gateway.chat(history, conversation, **scores), gateway.chat(history, **scores)
    assert warm.receipt["outcome"] == "partial"
    assert 0 < int(warm.receipt["reused"]) < int(warm.receipt["held"]) - 200
    assert warm.first_logprobs == pytest.approx(cold.first_logprobs, abs=1e-3)
    assert warm.text == cold.text


def test_hazard_03_generated_tokens_the_tokenizer_would_not_make_are_not_assumed(gateway: Gateway) -> None:
    """The client sends back text; only if its tokens are the generated ones does the answer's KV count."""
    conversation, prompt = fresh(), [40 + at % 50 for at in range(200)]
    gateway.complete(prompt, conversation)
    other = [*prompt, 45, 45, 45, 45, 45, 45, 45, 45, 45, 45]
    warm, cold = gateway.complete(other, conversation), gateway.complete(other)
    assert warm.text == cold.text
    assert warm.receipt["outcome"] == "partial"
    assert int(warm.receipt["reused"]) == 192


# --- the same turn twice, tenants -----------------------------------------------------------------------------------


def test_hazard_07_the_same_turn_twice_at_once_uses_the_handle_once(gateway: Gateway) -> None:
    conversation = fresh()
    history = [user(DOCUMENT)]
    history += [assistant(gateway.chat(history, conversation).text), user("Go on.")]
    expected = gateway.chat(history).text
    replies = gateway.at_once(*[lambda: gateway.chat(history, conversation)] * 2)
    assert [reply.text for reply in replies] == [expected] * 2
    assert sorted(reply.receipt["outcome"] for reply in replies) == ["cold", "reused"]


def test_hazard_09_another_tenant_does_not_get_the_conversation(gateway: Gateway) -> None:
    conversation, body = fresh(), {"model": MODEL, "messages": [user(DOCUMENT)], "temperature": 0, "max_tokens": 8}
    path = "/v1/chat/completions"
    gateway.post(path, body, conversation=conversation, authorization="Bearer A")
    stranger = gateway.post(path, body, conversation=conversation, authorization="Bearer B")
    owner = gateway.post(path, body, conversation=conversation, authorization="Bearer A")
    assert stranger.receipt["reason"] == "nothing_kept"
    assert owner.receipt["outcome"] == "partial"


# --- nothing leaks, nothing gets in ---------------------------------------------------------------------------------

INTERNAL = (b"remote_block_ids", b"remote_host", b"remote_engine_id", b"kvloop_digest", b'token_ids":[')


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("play", [play_chat, play_completions])
def test_the_client_sees_nothing_it_did_not_ask_for(gateway: Gateway, play: Any, stream: bool) -> None:
    for reply in [*play(gateway, fresh(), stream=stream), *play(gateway, None, stream=stream)]:
        assert not [word for word in INTERNAL if word in reply.raw]
        assert [name for name in reply.headers if name.startswith("x-kvloop-")] == ["x-kvloop-receipt"]


def test_a_client_that_asks_for_token_ids_gets_exactly_those(gateway: Gateway) -> None:
    reply = gateway.chat([user(DOCUMENT)], fresh(), return_token_ids=True)
    assert len(reply.messages[0]["prompt_token_ids"]) == int(reply.receipt["prompt"])
    assert len([t for c in reply.choices for t in c.get("token_ids") or ()]) == 24
    assert b"remote_block_ids" not in reply.raw


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv_transfer_p\\u0061rams"])
def test_hazard_10_a_client_cannot_make_a_worker_call_a_host(gateway: Gateway, key: str) -> None:
    """Passed on, these parameters would make D connect to the address in them."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(3)
        called = threading.Event()

        def listen() -> None:
            try:
                trap.accept()
            except TimeoutError:
                return
            called.set()

        listener = threading.Thread(target=listen)
        listener.start()
        params = (
            f'{{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"x","remote_request_id":"y",'
            f'"remote_block_ids":[[1]],"remote_host":"127.0.0.1","remote_port":{trap.getsockname()[1]},"tp_size":1}}'
        )
        body = (
            f'{{"model":"{MODEL}","max_tokens":4,"messages":[{{"role":"user","content":"hi"}}],'
            f'"{key}":{params},"vllm_xargs":{{"kv_transfer_params":"x"}}}}'
        )
        reply = gateway.post("/v1/chat/completions", body.encode())
        listener.join()
    assert reply.status == 200
    assert not called.is_set()


def test_hazard_10_transfer_parameters_past_the_gateway_meet_the_guard(gateway: Gateway) -> None:
    body = {"model": MODEL, "input": "hi", "kv_transfer_params": {"do_remote_decode": True}}
    assert gateway.post("/v1/responses", body).status == 403


# --- requests one handle cannot serve -----------------------------------------------------------------------------


def test_hazard_36_several_choices_are_answered_and_pin_nothing(gateway: Gateway) -> None:
    before = gateway.stack.kv_cache_usage("decode")
    reply = gateway.chat([user(DOCUMENT)], fresh(), n=2, temperature=0.8, stream=False)
    assert len(reply.choices) == 2
    assert reply.receipt == {"outcome": "decode_only", "reason": "several_sequences"}
    assert gateway.stack.kv_cache_usage("decode") == pytest.approx(before, abs=1e-6)


def test_hazard_46_prompt_logprobs_are_answered_by_d_alone(gateway: Gateway) -> None:
    reply = gateway.chat([user(DOCUMENT)], fresh(), prompt_logprobs=1, stream=False)
    assert len(reply.messages[0]["prompt_logprobs"]) > 500
    assert reply.receipt["reason"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_hazard_32_a_stop_string_leaves_no_handle_and_pins_nothing(gateway: Gateway, stream: bool) -> None:
    before = gateway.stack.kv_cache_usage("decode")
    conversation, history = fresh(), [user(DOCUMENT)]
    whole = gateway.chat(history, None, max_tokens=20).text
    wait_for(lambda: gateway.stack.kv_cache_usage("decode") <= before)
    stopped = gateway.chat(history, conversation, max_tokens=20, stop=[whole[6:9]], stream=stream)
    assert stopped.choices[-1]["finish_reason"] == "stop"
    assert whole.startswith(stopped.text)
    assert len(stopped.text) < len(whole)
    wait_for(lambda: gateway.stack.kv_cache_usage("decode") <= before)
    history += [assistant(stopped.text), user("Go on.")]
    after = gateway.chat(history, conversation)
    assert (after.receipt["outcome"], after.receipt["reason"]) == ("cold", "nothing_kept")
    assert after.text == gateway.chat(history).text


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 7, "max_tokens": 24},
        {"min_tokens": 5, "max_tokens": 7},
        {"stop": ["zzzzz"], "max_tokens": 7},
        {"stream_options": {"include_usage": True}, "max_tokens": 7},
        {"logprobs": True, "top_logprobs": 3, "max_tokens": 7},
        {"response_format": {"type": "json_object"}, "max_tokens": 7},
        {"priority": 3, "x_new": {"a": 1}, "cache_salt": "s", "max_tokens": 7},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "none",
            "max_tokens": 7,
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_hazard_22_47_every_field_gives_the_answer_d_alone_gives(gateway: Gateway, fields: dict[str, Any]) -> None:
    conversation, history = fresh(), [user(DOCUMENT)]
    gateway.chat(history, conversation, **fields)
    through = gateway.chat([*history, assistant("Yes."), user("Go on.")], conversation, **fields)
    alone = gateway.chat(
        [*history, assistant("Yes."), user("Go on.")],
        n=1,
        prompt_logprobs=0,
        **{**fields, "stream": False, "stream_options": None},
    )
    assert (through.status, alone.status) == (200, 200)
    assert through.text == alone.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "nobody", "messages": [user("hi")]}, 404),
        ({"model": MODEL, "messages": [user("x" * 50_000)]}, 400),
        ({"model": MODEL, "messages": "no list"}, 400),
        (b"{", 400),
    ],
)
def test_client_errors_come_back_in_openai_style(gateway: Gateway, body: Any, status: int) -> None:
    reply = gateway.post("/v1/chat/completions", body, conversation=fresh())
    assert reply.status == status
    assert reply.messages[0]["error"]["message"]


# --- the end of a handle ----------------------------------------------------------------------------------------------


def test_hazard_06_an_expired_handle_is_not_sent(gateway: Gateway) -> None:
    stack = gateway.stack
    short = {"TTL": "4", "MARGIN": "2"}
    settings = {f"KVLOOP_HANDLE_{name}_SECONDS": value for name, value in short.items()}
    stack.restart_extproc({**settings, "KVLOOP_REUSE_TIMEOUT_SECONDS": "2"})
    try:
        conversation, history = fresh(), [user(DOCUMENT)]
        history += [assistant(gateway.chat(history, conversation).text), user("Go on.")]
        time.sleep(2.2)
        late = gateway.chat(history, conversation)
    finally:
        stack.restart_extproc()
    assert late.receipt["outcome"] == "cold"
    assert late.receipt["reason"] in {"expired", "nothing_kept"}
    assert late.text == gateway.chat(history).text


def test_reuse_switched_off_is_cold_and_says_so(gateway: Gateway) -> None:
    gateway.stack.restart_extproc({"KVLOOP_REUSE": "false"})
    try:
        conversation = fresh()
        replies = [gateway.chat([user(DOCUMENT)], conversation) for _ in range(2)]
    finally:
        gateway.stack.restart_extproc()
    assert [reply.receipt["reason"] for reply in replies] == ["reuse_off"] * 2


def test_when_the_gateway_drains_d_s_blocks_come_back(gateway: Gateway) -> None:
    """Every handle still kept is released on the way out; nothing stays pinned on D, or on P beyond its lease."""
    for _ in range(3):
        gateway.chat([user(DOCUMENT + fresh())], fresh())
    assert gateway.stack.kv_cache_usage("decode") > 0
    gateway.stack.restart_extproc()
    wait_for(lambda: gateway.stack.kv_cache_usage("decode") == 0)


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


# --- workers fall: these come last, because they break things -----------------------------------------------------------


def test_hazard_13_a_restarted_d_is_not_read_with_old_handles(gateway: Gateway) -> None:
    conversation, history = fresh(), [user(DOCUMENT)]
    history += [assistant(gateway.chat(history, conversation).text), user("Go on.")]
    gateway.stack.restart_worker("decode")
    reply = gateway.chat(history, conversation)
    assert reply.status == 200
    assert reply.receipt["outcome"] == "cold"
    assert reply.text == gateway.chat(history).text


def test_with_p_down_d_serves_alone_and_its_handle_serves_the_next_turn(gateway: Gateway, digest: bool) -> None:
    conversation, history = fresh(), [user(DOCUMENT)]
    expected = gateway.chat(history).text
    gateway.stack.kill("prefill")
    reply = gateway.chat(history, conversation)
    assert reply.text == expected
    assert reply.receipt["outcome"] == "decode_only"
    assert reply.receipt["reason"] in {"prefill_failed", "prefill_unreachable"}
    gateway.stack.restart_worker("prefill")
    history += [assistant(reply.text), user("Go on.")]
    after = gateway.chat(history, conversation)
    # A D without the plugin would never free the blocks of such a turn, so it is not asked to keep them.
    assert after.receipt["outcome"] == ("reused" if digest else "cold")
    assert after.text == gateway.chat(history).text


def test_with_d_down_the_client_gets_an_honest_error_and_then_service_again(gateway: Gateway) -> None:
    gateway.stack.kill("decode")
    reply = gateway.chat([user(DOCUMENT)], fresh())
    assert reply.status == 503
    assert reply.messages[0]["error"]["message"]
    assert reply.headers["retry-after"]
    gateway.stack.restart_worker("decode")
    assert gateway.chat([user(DOCUMENT)], fresh()).status == 200
