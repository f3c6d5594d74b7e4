"""The same conversations on every kind of worker kvloop knows: never wrong KV, and reuse wherever it can be proven."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_harness import Answer, Chat, worker

from workers.sim.text import WORDS, Model

DOCUMENT = "".join(WORDS[2000:2300])

KINDS: dict[str, dict[str, Any]] = {
    "vLLM 0.32": {"streams_handles": False, "digests_handles": False},
    "vLLM 0.32 with the plugin's stream part": {"streams_handles": True, "digests_handles": False},
    "vLLM 0.32 with the plugin": {"streams_handles": True, "digests_handles": True},
    "vLLM 0.33": {"vllm_version": "0.33.0", "digests_handles": False},
    "vLLM 0.33 with the plugin": {"vllm_version": "0.33.0", "digests_handles": True},
}


def play(chat: Chat, gateway: Any, turns: int = 4, **options: Any) -> list[Answer]:
    """Play some turns and assert that each says what right KV says."""
    answers = []
    for turn in range(turns):
        answers.append(chat.say("And then?" if turn else DOCUMENT, **options))
        assert answers[-1].status == 200, answers[-1].raw
        assert answers[-1].text == gateway.right_text(chat.messages[:-1])
        if not turn and not gateway.fleet.decode[0].settings.digests_handles:
            # A handle without our digest does not tell it; kvloop asks the worker in the background.
            gateway.until(lambda: block_sizes_known(gateway), "the block sizes of all decode workers are known")
    return answers


def block_sizes_known(gateway: Any) -> bool:
    """Whether kvloop knows the block size of every worker it keeps a handle of."""
    return all(engine["block_size_tokens"] for engine in gateway.debug_state()["engines"])


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_on_every_kind_of_worker(start_gateway: Any, kind: str) -> None:
    gateway = start_gateway(decode=[worker("decode", **KINDS[kind])])
    streamed = play(gateway.new_chat(), gateway)
    whole = play(gateway.new_chat(), gateway, stream=False)
    reused = ["cold", "reused", "reused", "reused"]
    assert [answer.outcome for answer in whole] == reused
    assert [answer.outcome for answer in streamed] == (["cold"] * 4 if kind == "vLLM 0.32" else reused)
    for answer in streamed + whole:
        assert not {"prompt_token_ids", "token_ids", "remote_block_ids", "kvloop_digest"} & answer.told()


@pytest.mark.parametrize("kind", ["vLLM 0.32 with the plugin's stream part", "vLLM 0.32 with the plugin"])
@pytest.mark.parametrize("quirk", ["emits_pairs", "thinks"])
def test_a_history_the_worker_itself_rewrites_is_reused_only_as_far_as_it_holds(
    start_gateway: Any, kind: str, quirk: str
) -> None:
    model = Model(**{quirk: True, "mean_answer_tokens": 40})
    gateway = start_gateway(
        prefill=[worker("prefill", model=model)], decode=[worker("decode", model=model, **KINDS[kind])]
    )
    answers = play(gateway.new_chat(), gateway)
    assert [answer.outcome for answer in answers[1:]] == ["partial"] * 3, [answer.receipt for answer in answers]
