"""kvloop under other people's orchestrators, on real parts: vllm-router as it comes from PyPI, and a multi-turn proxy."""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_client import Gateway, Reply
from test_loop import DOCUMENT, INTERNAL, QUESTIONS, assistant, user, wait_for

from workers.intercepted import VLLM_ROUTER, Intercepted, Orchestrator
from workers.stack import Stack

PROXY = Path(__file__).with_name("multiturn_proxy.py")
MULTITURN_PROXY = Orchestrator(
    "multi-turn proxy",
    lambda port, _, prefill, decode: (sys.executable, str(PROXY), str(port), prefill, decode),
    settings={"KVLOOP_HANDLE_OWNER": "orchestrator"},
)


class Front(Gateway):
    """A client of an orchestrator instead of kvloop's own gateway."""

    def __init__(self, stack: Stack, intercepted: Intercepted) -> None:
        super().__init__(stack, intercepted.base_url)
        self.intercepted = intercepted


def front_of(stack: Stack, orchestrator: Orchestrator, directory: Path) -> Iterator[Front]:
    with Intercepted(stack, orchestrator, directory, lambda progress: print(progress, flush=True)) as intercepted:
        yield Front(stack, intercepted)
        intercepted.check()


@pytest.fixture(scope="module")
def router(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    yield from front_of(stack, VLLM_ROUTER, tmp_path_factory.mktemp("vllm-router"))


@pytest.fixture(scope="module")
def proxy(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    yield from front_of(stack, MULTITURN_PROXY, tmp_path_factory.mktemp("multiturn-proxy"))


def play(front: Front, *, stream: bool, **fields: Any) -> list[Reply]:
    messages: list[dict[str, str]] = [user(DOCUMENT + QUESTIONS[0])]
    replies = []
    for question in QUESTIONS[1:]:
        replies.append(front.chat(messages, stream=stream, **fields))
        messages += [assistant(replies[-1].text), user(question)]
    return replies


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_under_vllm_router_turns_read_what_the_turn_before_left(router: Front, stream: bool) -> None:
    reused = play(router, stream=stream, session_id=uuid.uuid4().hex)
    cold = play(router, stream=stream)
    assert [reply.status for reply in (*reused, *cold)] == [200] * 6
    assert [reply.text for reply in reused] == [reply.text for reply in cold]
    assert all(reply.text for reply in reused)
    assert [reply.receipt["outcome"] for reply in reused] == ["cold", "reused", "reused"]
    for earlier, later in itertools.pairwise(reused):
        assert later.receipt["reused"] == later.receipt["held"]
        assert int(later.receipt["reused"]) > int(earlier.receipt["prompt"])
    for reply in (*reused, *cold):
        assert not [word for word in (*INTERNAL, b"kvloop_prompt") if word in reply.raw]


def test_under_vllm_router_nothing_stays_on_d(router: Front) -> None:
    play(router, stream=True, session_id=uuid.uuid4().hex)
    play(router, stream=True)
    # Of turns without a conversation nothing was kept; the rest goes when kvloop drains.
    router.intercepted.restart_extproc()
    router.stack.restart_extproc()
    wait_for(lambda: router.stack.kv_cache_usage("decode") == 0)


def test_an_edited_history_under_vllm_router_reads_only_what_is_proven(router: Front) -> None:
    session = uuid.uuid4().hex
    said = router.chat([user(DOCUMENT)], session_id=session).text
    edited = [user(DOCUMENT), assistant("x" + said[1:]), user("Go on.")]
    warm, cold = router.chat(edited, session_id=session), router.chat(edited)
    assert (warm.receipt["outcome"], warm.text) == ("partial", cold.text)


def test_a_proxy_that_carries_handles_itself_has_them_proven(proxy: Front) -> None:
    reused = play(proxy, stream=True, conversation_id=uuid.uuid4().hex)
    cold = play(proxy, stream=True)
    assert [reply.text for reply in reused] == [reply.text for reply in cold]
    assert [reply.receipt["outcome"] for reply in reused] == ["cold", "reused", "reused"]


def test_a_proxy_that_attaches_a_handle_to_another_history_gives_the_right_answer(proxy: Front) -> None:
    """vLLM alone would read the whole handle for this prompt, and answer it wrongly."""
    conversation, scores = uuid.uuid4().hex, {"logprobs": True, "top_logprobs": 5}
    proxy.chat([user(DOCUMENT)], conversation_id=conversation)
    other = [user("X" + DOCUMENT[1:] + "Something else, then.")]
    warm, cold = proxy.chat(other, conversation_id=conversation, **scores), proxy.chat(other, **scores)
    assert warm.receipt["outcome"] in {"cold", "partial"}
    for token, logprob in cold.first_logprobs.items():
        assert warm.first_logprobs[token] == pytest.approx(logprob, abs=1e-3)
    assert warm.text == cold.text
