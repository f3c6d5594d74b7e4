"""What kvloop does, told as the story of one conversation: read this first."""

from __future__ import annotations

import orjson
from world import BLOCK_SIZE, FOR_DECODE, World, handle_params, receipt_of, sse

from extproc.events import Call, Leg, LegResult

QUESTION = [{"role": "user", "content": "How deep is the lake?"}]
FOLLOW_UP = [*QUESTION, {"role": "assistant", "content": "Forty metres."}, {"role": "user", "content": "And wide?"}]

FIRST_PROMPT = list(range(100))
ANSWER = [500, 501, 502]
SECOND_PROMPT = [*FIRST_PROMPT, *ANSWER, 600, 601]
HELD = len(FIRST_PROMPT) + len(ANSWER) - 1
"""The last generated token has no KV yet."""


def chat(messages: list[dict[str, str]], **fields: object) -> dict[str, object]:
    return {"model": "m", "messages": messages, "stream": True, "max_tokens": 64, **fields}


def prefill_worker(world: World, prompt: list[int]):
    """P, which computes what it must: everything, or what the attached handle does not cover."""

    def answer(call: Call) -> LegResult:
        params = orjson.loads(call.body)["kv_transfer_params"]
        read = min(params.get("remote_num_tokens", 0), len(prompt))
        kv = FOR_DECODE | {"remote_prefill_cached_tokens": read}
        return world.answer(200, {"kv_transfer_params": kv, "prompt_token_ids": prompt, "choices": []})

    return answer


def decode_stream(prompt: list[int], generated: list[int]) -> bytes:
    """D's stream: token ids because kvloop asked for them, the handle on the finish chunk."""
    first = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": prompt}
    middle = [{"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [token]}]} for token in generated[:-1]]
    last = {
        "choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": "stop", "token_ids": generated[-1:]}],
        "kv_transfer_params": handle_params(len(prompt) + len(generated) - 1),
    }
    return sse(first, *middle, last)


def test_life_of_a_request() -> None:
    """Turn 1 leaves its KV on D; turn 2 is proven to continue it, and P reads it there instead of computing it."""
    world = World(prefill=None)

    # Turn 1. Nothing is kept for this conversation, so P computes the whole prompt...
    world.prefill = prefill_worker(world, FIRST_PROMPT)
    first = world.run(
        [
            *world.request(chat(QUESTION), x_conversation_id="c1"),
            *world.response(decode_stream(FIRST_PROMPT, ANSWER)),
        ]
    )
    (prefill,) = first.leg_bodies(Leg.PREFILL)
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    # ...and D reads that KV from P, and gets the token ids P made of the prompt, so that nobody tokenises twice.
    assert first.decode["kv_transfer_params"] == FOR_DECODE | {
        "remote_prefill_cached_tokens": 0,
        "prompt_token_ids": FIRST_PROMPT,
    }
    assert receipt_of(first) == {
        "outcome": "cold", "reason": "nothing_kept", "reused": "0", "prompt": "100", "prefill_ms": "250.0",
    }  # fmt: skip
    # D's handle is kept and hidden from the client, like the token ids.
    assert first.receipt.captured == "kept"
    assert b"remote_block_ids" not in first.client_body
    assert b"[500]" not in first.client_body
    assert b'"content":"x"' in first.client_body

    # A stock D does not say how long its KV blocks are; kvloop asks, to be able to check and cut its handles.
    (question,) = first.learns
    world.pool.learn_block_size(question.engine_id, BLOCK_SIZE)

    # Turn 2. P renders the prompt, the proof finds that it starts with exactly what D holds...
    world.prefill = prefill_worker(world, SECOND_PROMPT)
    world.render = lambda _: world.answer(200, {"token_ids": SECOND_PROMPT})
    second = world.run(
        [
            *world.request(chat(FOLLOW_UP), x_conversation_id="c1"),
            *world.response(decode_stream(SECOND_PROMPT, [700, 701])),
        ]
    )
    # ...so P gets the handle, and the very ids that were proven.
    (prefill,) = second.leg_bodies(Leg.PREFILL)
    assert prefill["kv_transfer_params"] == handle_params(HELD) | {"prompt_token_ids": SECOND_PROMPT}
    assert receipt_of(second) == {
        "outcome": "reused", "reused": "102", "prompt": "105", "held": "102", "render_ms": "250.0", "prefill_ms": "250.0",
    }  # fmt: skip
    assert second.decode["kv_transfer_params"]["prompt_token_ids"] == SECOND_PROMPT

    # Turn 3 was edited: its history differs from token 70 on. Only whole blocks before that are attached.
    edited = [*SECOND_PROMPT[:70], 9999, *SECOND_PROMPT[71:], 800]
    world.prefill = prefill_worker(world, edited)
    world.render = lambda _: world.answer(200, {"token_ids": edited})
    third = world.run(
        [*world.request(chat(FOLLOW_UP), x_conversation_id="c1"), *world.response(decode_stream(edited, [900]))]
    )
    (prefill,) = third.leg_bodies(Leg.PREFILL)
    assert prefill["kv_transfer_params"]["remote_num_tokens"] == 64
    assert prefill["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    assert receipt_of(third)["outcome"] == "partial"
    assert receipt_of(third)["reason"] == "history_differs"

    # The same conversation named by another tenant is another conversation: nothing is found, nothing is taken.
    world.prefill = prefill_worker(world, SECOND_PROMPT)
    stranger = world.run(
        [
            *world.request(chat(FOLLOW_UP), x_conversation_id="c1", authorization="Bearer somebody-else"),
            *world.response(decode_stream(SECOND_PROMPT, [1])),
        ]
    )
    assert receipt_of(stranger)["reason"] == "nothing_kept"
