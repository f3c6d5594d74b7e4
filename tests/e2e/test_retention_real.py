"""On real vLLM: whichever way a conversation ends, D's memory is what it was before."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import httpx
import pytest
from loop_client import MODEL, Gateway

DOCUMENT = "The ferry leaves at nine from the north pier, unless the wind is above six. " * 10


def by_the_last_turn(gateway: Gateway, conversation: str, messages: list[dict[str, str]]) -> None:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, "stream": True}
    last = gateway.post("/v1/chat/completions", body, conversation=conversation, x_kvloop_end="true")
    assert (last.status, last.receipt["outcome"]) == (200, "reused")


def on_the_admin_port(gateway: Gateway, conversation: str, _: list[dict[str, str]]) -> None:
    answer = httpx.delete(f"{gateway.stack.url('extproc')}/conversations/{conversation}", params={"model": MODEL})
    assert answer.json()["released"] is True


def by_a_history_that_does_not_go_on(gateway: Gateway, conversation: str, _: list[dict[str, str]]) -> None:
    other = [{"role": "user", "content": "Something else. " * 40}]
    body = {"model": MODEL, "messages": other, "temperature": 0, "max_tokens": 24, "stream": True}
    last = gateway.post("/v1/chat/completions", body, conversation=conversation, x_kvloop_end="true")
    assert (last.receipt["outcome"], last.receipt["reason"]) == ("cold", "history_differs")


@pytest.mark.parametrize("end", [by_the_last_turn, on_the_admin_port, by_a_history_that_does_not_go_on])
def test_d_s_memory_is_free_again_however_a_conversation_ends(gateway: Gateway, end: Callable[..., None]) -> None:
    before = gateway.stack.kv_cache_usage("decode")
    conversation = uuid.uuid4().hex
    messages = [{"role": "user", "content": DOCUMENT}]
    messages.append({"role": "assistant", "content": gateway.chat(messages, conversation).text})
    assert gateway.stack.kv_cache_usage("decode") > before
    end(gateway, conversation, [*messages, {"role": "user", "content": "Thank you. In short?"}])
    deadline = time.monotonic() + 60
    while gateway.stack.kv_cache_usage("decode") > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gateway.stack.kv_cache_usage("decode") == pytest.approx(before, abs=1e-6)
