"""Hazards of docs/hazards.md that only the real Envoy, the real ext_proc and workers with KV can show; numbered like it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import operator
import os
import re
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_harness import Gateway, worker

from workers.sim.text import WORDS, Model

DOCUMENT = "".join(WORDS[1000:1300])
PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat_bodies(gateway: Gateway) -> list[Any]:
    return [received for received in gateway.fleet.received(gateway.fleet.workers) if received.path == PATH]


# --- wrong answers with HTTP 200 ----------------------------------------------------------------------------------------


def test_hazard_01_reasoning_the_client_strips_from_history_is_not_reused(start_gateway) -> None:
    model = Model(thinks=True, mean_answer_tokens=60)
    gateway = start_gateway(prefill=[worker("prefill", model=model)], decode=[worker("decode", model=model)])
    chat = gateway.new_chat()
    said = chat.say(DOCUMENT).text
    visible = re.sub(r"^<think>.*?</think>", "", said)
    assert visible
    assert visible != said
    chat.messages[-1]["content"] = visible
    answer = chat.say("And then?")
    assert answer.outcome == "partial"
    assert 0 < answer.receipt["reused"] < answer.receipt["held"]
    assert answer.text == gateway.right_text(chat.messages[:-1])


def test_hazard_04_of_two_branches_one_reuses_and_the_other_is_cold_and_right(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    branches = [[*chat.messages, user("And then?")], [*chat.messages, user("Why not?")]]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda messages: gateway.chat(chat.conversation, messages), branches))
    assert [answer.text for answer in answers] == [gateway.right_text(messages) for messages in branches]
    assert sorted(answer.outcome or "" for answer in answers) == ["cold", "reused"]


def test_hazard_04_a_compacted_history_is_answered_right(gateway) -> None:
    chat = gateway.new_chat()
    for turn in range(3):
        chat.say("".join(WORDS[1000 + 100 * turn : 1100 + 100 * turn]))
    summary = {"role": "system", "content": "So far: " + WORDS[1003]}
    chat.messages = [summary, *chat.messages[-2:], user("Go on.")]
    answer = chat.again()
    assert (answer.outcome, answer.reason) == ("cold", "history_differs")
    assert answer.text == gateway.right_text(chat.messages)


@pytest.mark.parametrize("spelling", ['{"city": "Oslo", "days": 3}', '{"days":3,"city":"Oslo"}', '{"city":"Oslo"}'])
def test_hazard_05_a_tool_call_the_client_spells_anew_is_proven_up_to_it(gateway, spelling: str) -> None:
    def history(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        told = {"role": "tool", "tool_call_id": "call_1", "content": WORDS[1400]}
        return [user(DOCUMENT), {"role": "assistant", "content": None, "tool_calls": [call]}, told]

    chat = gateway.new_chat()
    chat.messages = history('{"city":"Oslo","days":3}')
    said = chat.again().text
    again = [*history(spelling), {"role": "assistant", "content": said}, user("And tomorrow?")]
    answer = gateway.chat(chat.conversation, again)
    assert answer.outcome == "partial"
    assert answer.text == gateway.right_text(again)


def test_hazard_07_a_client_that_gives_up_and_asks_again_uses_the_handle_once(start_gateway) -> None:
    gateway = start_gateway()
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append(user("And then?"))
    gateway.fleet.strike(gateway.fleet.prefill[0], "stall", leg="prefill", with_handle=True, seconds=0.5)
    gateway.abandon(chat.conversation, chat.messages, lambda: gateway.report()["faults_struck"])
    answer = chat.again()
    assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")
    assert answer.text == gateway.right_text(chat.messages)
    sent = [r for r in gateway.received("prefill", leg="prefill") if b'"remote_block_ids"' in r.body]
    assert len(sent) == 1


def test_hazard_11_another_adapter_of_the_model_is_another_conversation(gateway) -> None:
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append(user("And then?"))
    adapted = chat.again(model="sim:adapter")
    assert (adapted.outcome, adapted.reason) == ("cold", "nothing_kept")
    assert adapted.text == gateway.right_text(chat.messages, model="sim:adapter") != gateway.right_text(chat.messages)
    assert chat.again().outcome == "reused"


def test_hazard_12_what_one_user_edits_does_not_reach_others_through_p_s_prefix_cache(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill", engine={"prefix_caching": True})])
    first_word = WORDS[5] + DOCUMENT[len(WORDS[1000]) :]
    for edited in (first_word, DOCUMENT.replace(WORDS[1150], ""), "".join(WORDS[1000:1200])):
        chat = gateway.new_chat()
        said = chat.say(DOCUMENT).text
        history = [user(edited), {"role": "assistant", "content": said}, user("And then?")]
        assert gateway.chat(chat.conversation, history).text == gateway.right_text(history)
        stranger = gateway.chat(None, history, tenant="somebody else")
        assert stranger.receipt["cached"] > 100, "P's prefix cache has served the other user"
        assert stranger.text == gateway.right_text(history)
    assert gateway.report()["poisoned_blocks_cached"] == 0


# --- outages, hangs, lost turns -----------------------------------------------------------------------------------------


def free_blocks(gateway: Gateway) -> list[int]:
    return [each["free_blocks"] for each in gateway.report()["workers"]]


@pytest.mark.parametrize("leg", ["render", "prefill", "decode"])
def test_hazard_16_a_client_that_leaves_in_any_leg_leaves_nothing_behind(start_gateway, leg: str) -> None:
    gateway = start_gateway(
        prefill=[worker("prefill", engine={"prefix_caching": False, "lease_seconds": 1.0})],
        decode=[worker("decode", engine={"prefix_caching": False})],
        extproc_env={"KVLOOP_REUSE_TIMEOUT_SECONDS": "1"},
    )
    at_start = free_blocks(gateway)
    for count, pause_seconds in enumerate((0.0, 0.005, 0.05), start=1):
        gateway.fleet.reset()
        leave(gateway, leg, pause_seconds)
        stage = {"render": "request", "prefill": "prefill", "decode": "decode"}[leg]
        assert counted(gateway, "abandoned", stage=stage) == count
        assert len(gateway.received("decode", path=PATH)) == 1 + (leg == "decode"), "no half request reached D"
        assert "kvloop_kept_turns 0.0" in gateway.metrics(), "nothing half-stored"
        gateway.until(lambda: free_blocks(gateway) == at_start, "every block is free again")


def leave(gateway: Gateway, leg: str, pause_seconds: float) -> None:
    """Leave the second turn of a new conversation so many seconds after this leg of it has begun."""
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    chat.messages.append(user("And then?"))
    where = gateway.fleet.decode if leg == "decode" else gateway.fleet.prefill
    name = "" if leg == "decode" else leg
    gateway.fleet.strike(where[0], "stall", path="/v1/", leg=name, seconds=pause_seconds + 0.05, times=1)

    def has_begun() -> bool:
        if not gateway.report()["faults_struck"]:
            return False
        time.sleep(pause_seconds)
        return True

    gateway.abandon(chat.conversation, chat.messages, has_begun)
    gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics(), "the abandoned request has ended")


def counted(gateway: Gateway, name: str, **labels: str) -> float:
    """Return the sum of ext_proc's counters whose name holds ``name`` and that have these labels."""
    pairs = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in gateway.metrics().splitlines() if f"{name}_total" in line.partition("{")[0]]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(pair in line for pair in pairs))


def test_hazard_15_p_s_blocks_for_a_client_that_left_come_back_with_the_lease(start_gateway) -> None:
    gateway = start_gateway(prefill=[worker("prefill", engine={"prefix_caching": False, "lease_seconds": 1.0})])
    at_start = free_blocks(gateway)[0]
    # D has the request and P's KV waits for it when the client leaves.
    gateway.fleet.strike(gateway.fleet.decode[0], "stall", path=PATH)
    gateway.abandon("c", [user(DOCUMENT)], lambda: gateway.report()["faults_struck"])
    gateway.until(lambda: counted(gateway, "abandoned", stage="decode") == 1, "it was counted")
    gateway.until(lambda: free_blocks(gateway)[0] == at_start, "P's lease ended")


def test_hazard_17_two_hundred_chats_that_never_return_do_not_fill_a_small_d(start_gateway) -> None:
    gateway = start_gateway(
        prefill=[worker("prefill", engine={"lease_seconds": 1.0})],
        decode=[worker("decode", engine={"block_count": 600, "max_model_len": 4096})],
        extproc_env={"KVLOOP_STORE_MAX_CONVERSATIONS": "10"},
    )

    def one_turn(number: int) -> Any:
        return gateway.chat(f"once-{number}", [user("".join(WORDS[number : number + 200]))], max_tokens=10)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one_turn, range(200)))
    assert {answer.status for answer in answers} == {200}
    assert all(answer.is_done for answer in answers)
    gateway.until(lambda: gateway.report()["live_pins"] == 10, "all but the kept handles were released")


def test_hazard_24_a_prefill_of_six_seconds_trips_no_timeout_of_the_shipped_configuration(start_gateway) -> None:
    gateway = start_gateway()
    gateway.fleet.strike(gateway.fleet.prefill[0], "stall", leg="prefill", seconds=6.0, times=1)
    answer = gateway.chat("c", [user(DOCUMENT)])
    assert (answer.status, answer.outcome) == (200, "cold")
    assert answer.receipt["prefill_ms"] > 6000
    assert answer.text == gateway.right_text([user(DOCUMENT)])


@pytest.mark.parametrize("pieces", [[], ['{"model"', ':"sim",'], ['{"model":"sim","messages":[', '{"role"', ":"]])
def test_hazard_28_an_upload_broken_off_anywhere_ends_cleanly(gateway, pieces: list[str]) -> None:
    earlier = counted(gateway, "abandoned", stage="request")
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
        client.sendall(head.encode())
        gateway.until(lambda: "kvloop_live_requests 1.0" in gateway.metrics())
        for piece in pieces:
            client.sendall(piece.encode())
            time.sleep(0.02)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics())
    assert counted(gateway, "abandoned", stage="request") == earlier + 1
    assert chat_bodies(gateway) == []
    assert "stream_failed" not in gateway.logs()


def test_hazard_29_even_a_gateway_told_to_fail_open_lets_no_transfer_parameters_in(start_gateway) -> None:
    """Full duplex never fails open once body bytes were seen; what needs no body passes, and carries none."""
    gateway = start_gateway(edit_envoy=_failing_open)
    gateway.kill_extproc()
    evil = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}}
    answers = [gateway.chat("c", HI, **evil) for _ in range(5)]
    assert {answer.status for answer in answers} <= {500, 503}
    assert all(answer.json["error"]["message"] for answer in answers)
    assert chat_bodies(gateway) == []
    assert gateway.request("GET", PATH).status == 404, "the worker's own answer: it did fail open"


def _failing_open(bootstrap: str) -> str:
    line = "allow_mode_override: true"
    (indent,) = re.findall(rf"^( +){line}", bootstrap, re.MULTILINE)
    return bootstrap.replace(line, f"{line}\n{indent}failure_mode_allow: true")


class Flood:
    """A decode worker that streams a hundred megabytes of events as fast as it can."""

    EVENT = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 16_000}}]}).encode() + b"\n\n"
    COUNT = 100_000_000 // len(EVENT)

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.sent = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(self.COUNT):
            await response.write(self.EVENT)
            self.sent += 1
        return response

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    def __enter__(self) -> str:
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


def memory_bytes(component: Any) -> int:
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in component.pids()]
    return sum(1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1]) for status in statuses)


def test_hazard_30_a_hundred_megabytes_past_a_stopped_processor_cost_little_memory(start_gateway) -> None:
    flood = Flood()
    with flood as address:
        gateway = start_gateway(envoy={"decode": (address,)})
        parts = (gateway.envoy, gateway.extproc[0])
        before = [memory_bytes(part) for part in parts]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(gateway.chat, "c", HI)
            gateway.until(lambda: flood.sent > flood.COUNT // 4)
            (processor,) = gateway.extproc[0].pids()
            os.kill(processor, signal.SIGSTOP)
            stood_at = gateway.until(lambda: (sent := flood.sent) and (time.sleep(0.5), flood.sent == sent)[1] and sent)
            during = [memory_bytes(part) for part in parts]
            os.kill(processor, signal.SIGCONT)
            answer = asking.result()
        after = [memory_bytes(part) for part in parts]
    assert stood_at < flood.COUNT, "the worker was held back while nobody read its answer"
    assert answer.raw == flood.EVENT * flood.COUNT
    assert max(map(operator.sub, [*during, *after], [*before, *before])) < 48 * 1024 * 1024


def test_hazard_31_an_answer_without_content_passes(gateway) -> None:
    for each in gateway.fleet.decode:
        gateway.fleet.strike(each, "status", path=PATH, status=204)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)) as connection:
        body = json.dumps({"model": "sim", "messages": HI}).encode()
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (204, b"")


def test_hazard_32_a_stop_string_ends_a_turn_without_handle_and_the_next_is_cold(gateway) -> None:
    chat = gateway.new_chat()
    whole = chat.say(DOCUMENT, max_tokens=20, ignore_eos=True).text
    chat.messages.pop()
    other = gateway.new_chat()
    other.messages = list(chat.messages)
    stopped = other.again(max_tokens=20, ignore_eos=True, stop=[whole[12:18]])
    assert stopped.finish_reason == "stop"
    assert whole.startswith(stopped.text)
    other.messages += [{"role": "assistant", "content": stopped.text}, user("And then?")]
    answer = other.again()
    assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")
    assert answer.text == gateway.right_text(other.messages)
    assert counted(gateway, "captured", fate="absent")


# --- the feature quietly does nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_hazard_34_35_a_handle_survives_usage_chunks_and_nulls(start_gateway, version: Any) -> None:
    gateway = start_gateway(decode=[worker("decode", vllm_version=version, digests_handles=False)])
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        chat = gateway.new_chat(stream_options=options)
        chat.say(DOCUMENT)
        gateway.until(lambda: gateway.received("decode", path="/metrics"), "the block size is being learnt")
        answer = chat.say("And then?")
        assert answer.outcome == "reused"
        assert answer.events[-1]["choices"] == []
        assert answer.events[-1]["usage"]["completion_tokens"] > 0


def test_hazard_39_a_client_that_takes_compressed_answers_gets_plain_ones_and_reuse(gateway) -> None:
    chat = gateway.new_chat(headers={"accept-encoding": "gzip, br"})
    chat.say(DOCUMENT)
    answer = chat.say("And then?")
    assert answer.outcome == "reused"
    assert "content-encoding" not in answer.headers
    assert not [r for r in chat_bodies(gateway) if "accept-encoding" in r.headers]


def test_hazard_40_replicas_with_stores_of_their_own_give_right_answers(start_gateway) -> None:
    gateway = start_gateway(replicas=2)
    chats = [gateway.new_chat() for _ in range(3)]
    outcomes = set()
    for turn in range(4):
        for chat in chats:
            answer = chat.say(DOCUMENT if not turn else "And then?")
            assert answer.status == 200
            assert answer.text == gateway.right_text(chat.messages[:-1])
            outcomes.add((answer.outcome, answer.reason))
    assert outcomes <= {("cold", "nothing_kept"), ("reused", None), ("partial", "history_differs")}
    assert ("cold", "nothing_kept") in outcomes


def test_hazard_41_a_handle_that_says_localhost_is_not_attached_and_told_once(start_gateway) -> None:
    gateway = start_gateway(extproc_env={"KVLOOP_SINGLE_HOST": "false"})
    chat = gateway.new_chat()
    for _ in range(3):
        answer = chat.say(DOCUMENT)
        assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")
        assert not {"remote_host", "remote_block_ids"} & answer.told()
    assert gateway.extproc[0].output().count("handle_with_loopback_host") == 1
    assert counted(gateway, "captured", fate="loopback_host") == 3


@pytest.mark.parametrize("digest", [True, False], ids=["digest", "token_ids"])
def test_hazard_43_a_handle_of_sixty_kilobytes_in_one_event_is_kept_and_used(start_gateway, digest: bool) -> None:
    engine = {"block_size": 1, "block_count": 40_000, "max_model_len": 16_384}
    gateway = start_gateway(
        prefill=[worker("prefill", engine=engine)],
        decode=[worker("decode", engine=engine, digests_handles=digest)],
    )
    chat = gateway.new_chat(max_tokens=5)
    chat.say("".join(WORDS[at % len(WORDS)] for at in range(11_000)))
    gateway.until(lambda: digest or gateway.received("decode", path="/metrics"), "the block size is being learnt")
    answer = chat.say("And then?")
    assert answer.outcome == "reused", answer.receipt
    (used,) = [r for r in gateway.received("prefill", leg="prefill") if b'"remote_block_ids"' in r.body]
    assert len(json.dumps(used.json["kv_transfer_params"]["remote_block_ids"])) > 55_000
    assert answer.text == gateway.right_text(chat.messages[:-1], max_tokens=5)


CLOCK = """
import datetime, os, time
_real = time.time
def _jumped():
    try:
        return _real() + float(open(os.environ["CLOCK_JUMP"]).read())
    except OSError:
        return _real()
time.time = _jumped
class _Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=_jumped() - _real())
datetime.datetime = _Jumping
"""


def test_hazard_45_a_wall_clock_that_jumps_an_hour_changes_nothing(start_gateway, tmp_path) -> None:
    jump, site = tmp_path / "jump", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK)
    path = ":".join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    gateway = start_gateway(extproc_env={"PYTHONPATH": path, "CLOCK_JUMP": str(jump)})
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    for jump_seconds in (-3600, 3600):
        jump.write_text(str(jump_seconds))
        assert chat.say("And then?").outcome == "reused"
        assert _hour_of_last_log_line(gateway) != _hour_now(), "the clock did jump"
    time.sleep(1.2)  # longer than the interval at which expired handles are cleared
    assert chat.say("And then?").outcome == "reused"


def _hour_of_last_log_line(gateway: Gateway) -> str:
    lines = [line for line in gateway.extproc[0].output().splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["timestamp"][:13]


def _hour_now() -> str:
    return time.strftime("%Y-%m-%dT%H", time.gmtime())


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("digest", [True, False], ids=["digest", "token_ids"])
def test_hazard_49_a_client_sees_the_chunks_d_alone_would_have_sent(start_gateway, version: Any, digest: bool) -> None:
    gateway = start_gateway(decode=[worker("decode", vllm_version=version, digests_handles=digest)])
    options = {"max_tokens": 12, "ignore_eos": True}
    through = gateway.chat("c", [user(DOCUMENT)], **options)
    # Of several answers none is split between P and D, so D's own bytes come back.
    alone = gateway.chat(None, [user(DOCUMENT)], prompt_logprobs=0, **options)
    assert alone.outcome == "decode_only"
    assert all(event["choices"][0] is not None for event in through.events)
    assert [_shape(event) for event in through.events] == [
        {**_shape(event), "prompt_logprobs": None} for event in alone.events
    ]


def _shape(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in {"id", "created"}} | {"prompt_logprobs": None}
