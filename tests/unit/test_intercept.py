"""The roles prefill and decode together, under an orchestrator that knows nothing of them: a story, then both owners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson
from world import BLOCK_SIZE, FOR_DECODE, Seen, World, handle_params, sse

from extproc.events import Call, Leg, LegResult, header
from extproc.intercept_decode import DecodeExchange
from extproc.intercept_prefill import PrefillExchange
from extproc.settings import GatewaySettings

QUESTION = [{"role": "user", "content": "How deep is the lake?"}]
FIRST_PROMPT = list(range(100))
ANSWER = [500, 501, 502]
SECOND_PROMPT = [*FIRST_PROMPT, *ANSWER, 600, 601]
HELD = len(FIRST_PROMPT) + len(ANSWER) - 1
NOTHING_REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
"""Transfer parameters of a prefill leg, as vllm-router spells them (in part)."""


def handle_of_turn(number: int, tokens: int = HELD) -> dict[str, Any]:
    return handle_params(tokens, remote_request_id=f"chatcmpl-{number}")


@dataclass
class Orchestrator:
    """A P/D router of the usual shape. ``carried``: D's handle, if it carries handles from turn to turn itself."""

    world: World
    carries_handles: bool = False
    carried: dict[str, Any] = field(default_factory=dict)
    turns: int = 0

    def turn(self, prompt: list[int], generated: list[int], **fields: Any) -> tuple[Seen, Seen]:
        """Play one turn: P tokenises to ``prompt``, D generates ``generated``."""
        body = {"model": "m", "messages": QUESTION, "max_tokens": 64, **fields}
        attached, self.carried = self.carried, {}
        self.turns += 1
        first = self.prefill(prompt, body | {"max_tokens": 1, "kv_transfer_params": NOTHING_REMOTE | attached})
        params = orjson.loads(first.replied.body)["kv_transfer_params"]
        # Published proxies put the address they reach P by in the place of P's own.
        second = self.decode(
            prompt, generated, body | {"stream": True, "kv_transfer_params": params | {"remote_host": "envoy"}}
        )
        if self.carries_handles:
            events = [
                orjson.loads(line[6:]) for line in second.client_body.split(b"\n\n") if line.startswith(b"data: {")
            ]
            self.carried = events[-1]["kv_transfer_params"] | {"remote_host": "envoy"}
        return first, second

    def prefill(self, prompt: list[int], body: dict[str, Any]) -> Seen:
        world = self.world
        world.role = PrefillExchange
        world.render = lambda _: world.answer(200, {"token_ids": prompt})

        def prefill(call: Call) -> LegResult:
            read = orjson.loads(call.body)["kv_transfer_params"].get("remote_num_tokens", 0)
            kv = FOR_DECODE | {"remote_host": "10.0.0.1", "remote_prefill_cached_tokens": read}
            choice = {"index": 0, "message": {"content": "x"}, "token_ids": [1]}
            return world.answer(200, {"choices": [choice], "prompt_token_ids": prompt, "kv_transfer_params": kv})

        world.prefill = prefill
        return world.run(world.request(body))

    def decode(self, prompt: list[int], generated: list[int], body: dict[str, Any]) -> Seen:
        world = self.world
        world.role = DecodeExchange
        first = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": prompt}
        middle = [{"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [i]}]} for i in generated[:-1]]
        last = {
            "choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": "stop", "token_ids": generated[-1:]}],
            "kv_transfer_params": handle_of_turn(self.turns, len(prompt) + len(generated) - 1),
        }
        return world.run([*world.request(body), *world.response(sse(first, *middle, last))])


def test_a_conversation_under_somebody_elses_orchestrator() -> None:
    """Turn 1 leaves its KV on D; in turn 2 the orchestrator's own prefill leg reads it there, and it never learns."""
    world = World(settings=GatewaySettings(decode_block_size_tokens=BLOCK_SIZE))
    router = Orchestrator(world)

    # Turn 1. The orchestrator's prefill leg goes to P as it is, but for a question for the prompt's ids...
    prefilled, decoded = router.turn(FIRST_PROMPT, ANSWER, session_id="c1")
    (leg,) = prefilled.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == NOTHING_REMOTE
    assert (leg["max_tokens"], leg["session_id"], leg["return_token_ids"]) == (1, "c1", True)
    # ...which P's answer does not show to the orchestrator. In the transfer parameters it gets, there is a mark.
    answered = orjson.loads(prefilled.replied.body)
    assert (prefilled.replied.status, answered["prompt_token_ids"]) == (200, None)
    assert answered["choices"] == [{"index": 0, "message": {"content": "x"}, "token_ids": None}]
    assert answered["kv_transfer_params"].keys() - {"kvloop_prompt"} == {
        *FOR_DECODE,
        "remote_host",
        "remote_prefill_cached_tokens",
    }

    # The decode leg arrives with them. The mark is taken out, and P's own host stands where P had put it.
    assert decoded.decode["kv_transfer_params"] == FOR_DECODE | {
        "remote_host": "10.0.0.1",
        "remote_prefill_cached_tokens": 0,
    }
    assert decoded.decode["return_token_ids"] is True
    # D's handle is kept, and neither it nor the ids reach the orchestrator, whose client sees what was done for it.
    assert decoded.receipt.captured == "kept"
    assert b"remote_block_ids" not in decoded.client_body
    assert b"[500]" not in decoded.client_body
    assert header(decoded.response_headers.set_headers, "x-kvloop-receipt") == (
        "outcome=cold, reason=nothing_kept, reused=0, prompt=100, prefill_ms=250.0"
    )

    first_kinds = decoded.kinds

    # Turn 2. P renders the prompt, it is proven to go on where D stands, and P reads D's KV.
    prefilled, decoded = router.turn(SECOND_PROMPT, [700], session_id="c1")
    (leg,) = prefilled.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == handle_of_turn(1) | {"prompt_token_ids": SECOND_PROMPT}
    assert str(prefilled.receipt.outcome) == "reused"
    # Both were told apart for the retention's sake.
    assert [kind.partition(":")[2] for kind in (*first_kinds, *decoded.kinds)] == ["first", "later"]
    assert "outcome=reused, reused=102" in (header(decoded.response_headers.set_headers, "x-kvloop-receipt") or "")
    assert decoded.receipt.captured == "kept"


def test_an_orchestrator_may_carry_the_handles_itself_and_has_them_proven() -> None:
    settings = GatewaySettings(decode_block_size_tokens=BLOCK_SIZE, handle_owner="orchestrator")
    router = Orchestrator(World(settings=settings), carries_handles=True)
    _, decoded = router.turn(FIRST_PROMPT, ANSWER)
    assert decoded.receipt.captured == "kept"
    assert router.carried == handle_of_turn(1) | {"remote_host": "envoy"}

    prefilled, _ = router.turn(SECOND_PROMPT, [700])
    (leg,) = prefilled.leg_bodies(Leg.PREFILL)
    # What goes to P is the handle as D wrote it.
    assert leg["kv_transfer_params"] == handle_of_turn(1) | {"prompt_token_ids": SECOND_PROMPT}
    assert str(prefilled.receipt.outcome) == "reused"

    # The history was edited: of what the orchestrator attaches, only what is proven passes.
    prefilled, _ = router.turn([*SECOND_PROMPT[:70], 9999, 800, 801], [1])
    (leg,) = prefilled.leg_bodies(Leg.PREFILL)
    assert (leg["kv_transfer_params"]["remote_num_tokens"], str(prefilled.receipt.outcome)) == (64, "partial")


def test_hazard_07_a_handle_the_orchestrator_sends_twice_is_attached_once() -> None:
    settings = GatewaySettings(decode_block_size_tokens=BLOCK_SIZE, handle_owner="orchestrator")
    router = Orchestrator(World(settings=settings), carries_handles=True)
    router.turn(FIRST_PROMPT, ANSWER)
    carried = dict(router.carried)
    router.turn(SECOND_PROMPT, [700])
    router.carried = carried
    prefilled, _ = router.turn(SECOND_PROMPT, [700])
    (leg,) = prefilled.leg_bodies(Leg.PREFILL)
    assert leg["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (str(prefilled.receipt.outcome), str(prefilled.receipt.reason)) == ("cold", "nothing_kept")
