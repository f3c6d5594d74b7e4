"""What D calls token ids may be anything: the client's answer goes on, and nothing is kept by them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from world import FOR_DECODE, World, handle_params, sse

from extproc.events import ForwardResponseHeaders, ResponseHeaders
from extproc.intercept_decode import DecodeExchange
from extproc.prompt_mark import put_mark
from extproc.settings import GatewaySettings

IDS = list(range(1, 1001))
GENERATED = [5, 6, 7, 8]
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def answer(world: World, prompt: list[Any], generated: list[Any]) -> list[Any]:
    delta = {"index": 0, "delta": {"content": "a"}, "token_ids": generated, "finish_reason": None}
    handle = handle_params(1003, digest_of=(IDS + GENERATED)[:1003])
    end = {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": handle}
    return world.response(sse({"id": "x", "prompt_token_ids": prompt, "choices": [delta]}, end))


@pytest.mark.parametrize(
    ("prompt", "generated"),
    [(IDS, [-1]), (IDS, [2**40]), (IDS, [1.5]), (IDS, ["a"]), ([*IDS[:-1], -1], GENERATED)],
)
def test_they_stop_no_stream_where_turns_are_read_back_early(prompt: list[Any], generated: list[Any]) -> None:
    world = World(settings=GatewaySettings(return_mode="eager"))
    prefilled = {"kv_transfer_params": FOR_DECODE, "choices": [{"prompt_token_ids": IDS}]}
    world.prefill = lambda _: world.answer(200, prefilled)
    seen = world.run([*world.request(REQUEST, x_conversation_id="c"), *answer(world, prompt, generated)])
    assert seen.client_body.endswith(b"[DONE]\n\n")
    assert len(world.store) == 1, "D's digest proves the turn all the same"


@pytest.mark.parametrize("prompt", [[*IDS[:-1], -1], [*IDS[:-1], 2**40], ["a"]])
def test_they_stop_no_stream_of_an_orchestrator_and_prove_nothing(prompt: list[Any]) -> None:
    world = World(role=DecodeExchange, settings=GatewaySettings())
    params = orjson.loads(put_mark(orjson.dumps(FOR_DECODE), IDS, "outcome=cold"))
    request = {**REQUEST, "kv_transfer_params": params, "return_token_ids": True}
    seen = world.run([*world.request(request, x_conversation_id="c"), *answer(world, prompt, GENERATED)])
    assert seen.client_body.endswith(b"[DONE]\n\n")
    assert [release.reason for release in seen.releases] == ["prompt_ids_differ"]
    assert len(world.store) == 0


def test_an_upload_envoy_gives_up_on_makes_room_for_others_at_once() -> None:
    world = World()
    events = [*world.request(REQUEST)[:2], ResponseHeaders(((":status", "408"),), end_of_stream=False, at=world.now)]
    running = world.role(world.settings, world.pool, "", load=world.load).run()
    effect = next(running)
    for event in events:
        effect = running.send(event)
    assert isinstance(effect, ForwardResponseHeaders)
    running.send(None)
    assert world.load.preparing == 0
