"""Simulated workers over HTTP: the legs as kvloop sends them, options, quirks, faults, clients that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sim_client import CHAT, COLD, SimClient

from extproc.proof import common_prefix, from_json
from workers.sim.engine import EngineSettings
from workers.sim.faults import fault_from_json
from workers.sim.settings import Timing, WorkerSettings
from workers.sim.text import WORDS, Model
from workers.sim.worker import SimWorker

DOCUMENT = "".join(WORDS[500:700])
ENGINE = EngineSettings(block_count=512, block_size=16, max_model_len=4096, prefix_caching=False, repaired=True)
ALONE = {"do_remote_decode": False, "do_remote_prefill": False}


def until(fact: Callable[[], Any]) -> Any:
    """Wait until ``fact()`` is true."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if found := fact():
            return found
        time.sleep(0.005)
    raise AssertionError("never became true")


def fleet(**options: Any) -> SimClient:
    """One worker of each kind; only the decode worker has the plugin's repair."""
    settings = {"engine": ENGINE, "streams_handles": True, **options}
    unrepaired = {**settings, "engine": replace(settings["engine"], repaired=False)}
    return SimClient([WorkerSettings(role="prefill", **unrepaired)], [WorkerSettings(role="decode", **settings)])


@pytest.fixture(scope="module")
def shared() -> Iterator[SimClient]:
    with fleet() as started:
        yield started


@pytest.fixture
def sims(shared: SimClient) -> SimClient:
    """One prefill and one decode worker, with nothing retained and nothing counted."""
    shared.skip(1000)
    shared.reset()
    for worker in shared.workers:
        shared.call(lambda worker=worker: worker.engine.expire(worker.runner.now()))
        worker.engine.counters = type(worker.engine.counters)()
    return shared


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def report(worker: SimWorker, sims: SimClient) -> dict[str, Any]:
    return sims.call(worker.report)


# --- legs -----------------------------------------------------------------------------------------------------------


def test_turn_after_turn_a_proven_handle_changes_no_word(sims: SimClient) -> None:
    messages = [user(DOCUMENT)]
    handle = None
    for _ in range(4):
        said, handle, passed_on = sims.turn(messages, handle)
        assert (
            said
            == json.loads(sims.post(sims.decode[0], CHAT, {"messages": messages}))["choices"][0]["message"]["content"]
        )
        messages += [{"role": "assistant", "content": said}, user("And?")]
    assert passed_on["remote_prefill_cached_tokens"] > 200
    assert sims.total("wrong_kv_turns") == 0
    assert (report(sims.decode[0], sims)["handles_read"], report(sims.decode[0], sims)["live_pins"]) == (3, 1)


def test_a_blindly_attached_handle_changes_the_text_and_is_counted(sims: SimClient) -> None:
    messages = [user(DOCUMENT)]
    said, handle, _ = sims.turn(messages)
    messages = [user("Other" + DOCUMENT), {"role": "assistant", "content": said}, user("And?")]
    wrong, _, _ = sims.turn(messages, handle)
    right, _, _ = sims.turn(messages)
    assert wrong != right
    assert sims.total("wrong_kv_turns") == 2


def test_forwarded_prompt_ids_are_taken_for_chats_and_save_the_tokenising(sims: SimClient) -> None:
    body = {"messages": [user("ignored")], "max_tokens": 1, "return_token_ids": True}
    ids = [300, 301, 302]
    answer = json.loads(
        sims.post(sims.prefill[0], CHAT, {**body, "kv_transfer_params": {**COLD, "prompt_token_ids": ids}})
    )
    assert (answer["prompt_token_ids"], report(sims.prefill[0], sims)["tokenisations"]) == (ids, 0)
    sims.post(sims.prefill[0], CHAT, body)
    assert report(sims.prefill[0], sims)["tokenisations"] == 1


def test_forwarded_prompt_ids_are_ignored_for_completions_and_for_images(sims: SimClient) -> None:
    params = {**COLD, "prompt_token_ids": [300]}
    completion = {"prompt": "ab", "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": params}
    answer = json.loads(sims.post(sims.prefill[0], "/v1/completions", completion))
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    chat = {"messages": [{"role": "user", "content": image}], "return_token_ids": True, "kv_transfer_params": params}
    assert len(json.loads(sims.post(sims.prefill[0], CHAT, chat))["prompt_token_ids"]) > 1


def test_render_and_tokenize_agree_with_what_is_prefilled(sims: SimClient) -> None:
    body = {"messages": [user(DOCUMENT)]}
    rendered = json.loads(sims.post(sims.prefill[0], f"{CHAT}/render", body))["token_ids"]
    tokenised = json.loads(sims.post(sims.prefill[0], "/tokenize", body))
    answer = json.loads(sims.post(sims.prefill[0], CHAT, {**body, "return_token_ids": True}))
    assert rendered == tokenised["tokens"] == answer["prompt_token_ids"]
    assert tokenised["count"] == len(rendered)


def test_reads_work_between_processes_over_http(sims: SimClient) -> None:
    with fleet() as others:  # another registry: these workers know of each other by address only
        messages = [user(DOCUMENT)]
        said, handle, _ = sims.turn(messages)
        messages += [{"role": "assistant", "content": said}, user("And?")]
        others.prefill_leg(CHAT, {"messages": messages}, handle)
        assert others.total("wrong_kv_turns") == 0
        assert report(sims.decode[0], sims)["handles_read"] == 1
        assert report(others.prefill[0], others)["prompt_tokens_trusted"] == handle["remote_num_tokens"]


# --- options --------------------------------------------------------------------------------------------------------


def test_max_completion_tokens_wins_over_max_tokens(sims: SimClient) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 1, "max_completion_tokens": 7, "ignore_eos": True}
    assert json.loads(sims.post(sims.decode[0], CHAT, body))["usage"]["completion_tokens"] == 7


def test_a_completion_without_max_tokens_has_sixteen(sims: SimClient) -> None:
    body = {"prompt": "Hi", "ignore_eos": True}
    assert json.loads(sims.post(sims.decode[0], "/v1/completions", body))["usage"]["completion_tokens"] == 16


def test_a_stop_string_ends_the_answer_without_a_handle_and_keeps_no_blocks(sims: SimClient) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 30, "ignore_eos": True, "kv_transfer_params": ALONE}
    whole = json.loads(sims.post(sims.decode[0], CHAT, body))
    stop = whole["choices"][0]["message"]["content"][40:45]
    cut = json.loads(sims.post(sims.decode[0], CHAT, {**body, "stop": stop}))
    choice = cut["choices"][0]
    assert whole["choices"][0]["message"]["content"].partition(stop)[0] == choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"], cut["kv_transfer_params"]) == ("stop", stop, None)
    assert report(sims.decode[0], sims)["live_pins"] == 1


def test_a_stop_token_ends_the_answer_with_a_handle(sims: SimClient) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    third = json.loads(sims.post(sims.decode[0], CHAT, body))["choices"][0]["token_ids"][2]
    stopped = {**body, "ignore_eos": False, "stop_token_ids": [third], "kv_transfer_params": ALONE}
    answer = json.loads(sims.post(sims.decode[0], CHAT, stopped))
    assert answer["choices"][0]["stop_reason"] == third
    assert answer["kv_transfer_params"]["remote_num_tokens"] == answer["usage"]["prompt_tokens"] + 2


def test_several_prompts_are_several_choices(sims: SimClient) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    choices = json.loads(sims.post(sims.decode[0], "/v1/completions", body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99, 100], [99, 100]]
    streamed = sims.post(sims.decode[0], "/v1/completions", {**body, "stream": True})
    assert sims.text(streamed).count(" ") == 12


def test_echo_returns_the_prompt_of_a_completion(sims: SimClient) -> None:
    body = {"prompt": "Once upon", "echo": True, "max_tokens": 1}
    assert sims.text(sims.post(sims.decode[0], "/v1/completions", body)).startswith("Once upon")


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "valid string"),
        ("/v1/completions", {"prompt": [99_999_999]}, 400, "out of vocabulary"),
        ("/v1/completions", [], 400, "dictionary"),
        (CHAT, {"messages": [{"content": "no role"}]}, 400, "Field required"),
        (CHAT, {"messages": [], "kv_transfer_params": {"prompt_token_ids": []}}, 400, "non-empty list"),
        (CHAT, {"messages": [], "stream_options": {}}, 200, ""),
        (CHAT, {"messages": [], "stream_options": {"include_usage": True}}, 400, "Stream options"),
        (CHAT, {"messages": [], "model": "sim:lora"}, 200, "sim:lora"),
        (f"{CHAT}/render", {"messages": [], "model": "nobody"}, 404, "does not exist"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "does not exist"),
        ("/v1/embeddings", {}, 404, "Not Found"),
    ],
)
def test_requests_are_refused_as_vllm_does(sims: SimClient, path: str, body: Any, status: int, word: str) -> None:
    got, answer = sims.exchange(sims.decode[0], path, body)
    assert (got, word in answer.decode()) == (status, True), answer


def test_what_is_not_json_is_refused(sims: SimClient) -> None:
    with contextlib.closing(http.client.HTTPConnection(sims.decode[0].address)) as connection:
        connection.request("POST", CHAT, b"{not json")
        assert connection.getresponse().status == 400


def test_a_refused_decode_leg_frees_what_the_prefill_worker_kept_for_it(sims: SimClient) -> None:
    passed_on = sims.prefill_leg(CHAT, {"messages": [user("Hi")]})["kv_transfer_params"]
    assert report(sims.prefill[0], sims)["live_leases"] == 1
    body = {"messages": [user("Hi")], "model": "nobody", "kv_transfer_params": passed_on}
    assert sims.exchange(sims.decode[0], CHAT, body)[0] == 404
    until(lambda: report(sims.prefill[0], sims)["live_leases"] == 0)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/v1/models", "/metrics", "/sim/report"])
def test_a_worker_shows_what_is_asked_of_it(sims: SimClient, path: str) -> None:
    sims.get(sims.decode[0], path)


# --- quirks ---------------------------------------------------------------------------------------------------------


def test_retokenised_history_differs_when_the_model_emits_pairs() -> None:
    with fleet(model=Model(emits_pairs=True, mean_answer_tokens=1000)) as sims:
        body = {"messages": [user("Hi")], "max_tokens": 40, "return_token_ids": True}
        first = json.loads(sims.post(sims.decode[0], CHAT, body))
        said = first["choices"][0]["message"]["content"]
        longer = [user("Hi"), {"role": "assistant", "content": said}, user("And?")]
        rendered = json.loads(sims.post(sims.decode[0], f"{CHAT}/render", {"messages": longer}))["token_ids"]
        generated = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert rendered[: len(generated)] != generated
        assert rendered[: len(first["prompt_token_ids"])] == first["prompt_token_ids"]


def test_thoughts_are_said_once_and_dropped_from_history() -> None:
    with fleet(model=Model(thinks=True)) as sims:
        said = sims.text(sims.post(sims.decode[0], CHAT, {"messages": [user("Hi")]}))
        assert said.startswith("<think>")
        told = {"messages": [user("Hi"), {"role": "assistant", "content": said}, user("And?")]}
        untold = {
            "messages": [user("Hi"), {"role": "assistant", "content": said.split("</think>")[1].lstrip()}, user("And?")]
        }
        rendered = [
            json.loads(sims.post(sims.decode[0], f"{CHAT}/render", body))["token_ids"] for body in (told, untold)
        ]
        assert rendered[0] == rendered[1]


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_status_fault_strikes_the_next_requests_it_names_and_no_more(sims: SimClient) -> None:
    sims.strike(sims.decode[0], "status", status=503, times=2, path=CHAT)
    body = {"messages": [user("Hi")]}
    assert sims.exchange(sims.decode[0], "/v1/completions", {"prompt": "a"})[0] == 200
    assert [sims.exchange(sims.decode[0], CHAT, body)[0] for _ in range(3)] == [503, 503, 200]


def test_a_fault_may_wait_for_a_leg_or_for_a_handle(sims: SimClient) -> None:
    sims.strike(sims.prefill[0], "status", status=500, leg="prefill")
    sims.strike(sims.prefill[0], "status", status=502, with_handle=True)
    body = {"messages": [user("Hi")]}
    assert sims.exchange(sims.prefill[0], CHAT, body)[0] == 200
    assert sims.exchange(sims.prefill[0], CHAT, body, {"x-kvloop-leg": "prefill"})[0] == 500
    params = {"kv_transfer_params": {**COLD, "remote_block_ids": [[1]]}}
    assert sims.exchange(sims.prefill[0], CHAT, {**body, **params})[0] == 502


def test_a_reset_breaks_the_connection_before_any_answer(sims: SimClient) -> None:
    sims.strike(sims.decode[0], "reset", times=1)
    with pytest.raises(ConnectionError):
        sims.exchange(sims.decode[0], CHAT, {"messages": [user("Hi")]})


def test_a_stalled_request_goes_on_when_the_fault_is_cleared(sims: SimClient) -> None:
    sims.strike(sims.decode[0], "stall")
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(sims.exchange, sims.decode[0], CHAT, {"messages": [user("Hi")]})
        until(lambda: report(sims.decode[0], sims)["faults_struck"])
        assert not stalled.done()
        sims.call(sims.decode[0].clear_faults)
        assert stalled.result(20)[0] == 200


def test_a_truncated_stream_ends_inside_an_event(sims: SimClient) -> None:
    sims.strike(sims.decode[0], "truncate", after_events=2, times=1)
    with contextlib.closing(http.client.HTTPConnection(sims.decode[0].address)) as connection:
        connection.request("POST", CHAT, json.dumps({"messages": [user("Hi")], "stream": True}))
        response = connection.getresponse()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    assert report(sims.decode[0], sims)["faults_struck"] == 1


def test_a_failed_read_makes_a_decode_worker_compute_the_prompt_itself(sims: SimClient) -> None:
    sims.strike(sims.prefill[0], "failed_read", times=1)
    sims.turn([user(DOCUMENT)])
    assert (report(sims.decode[0], sims)["reads_failed"], sims.total("wrong_kv_turns")) == (1, 0)


def test_a_slow_read_gets_what_lies_there_when_it_comes_to_it(sims: SimClient) -> None:
    _, handle, _ = sims.turn([user(DOCUMENT)])
    sims.strike(sims.decode[0], "slow_read", seconds=0.05, times=1)
    sims.prefill_leg(CHAT, {"messages": [user(DOCUMENT)]}, {**handle, "remote_num_tokens": 100})
    assert report(sims.decode[0], sims)["handles_read"] == 1


def test_a_prefill_worker_that_parks_handles_answers_only_requests_without() -> None:
    with fleet() as sims:
        said, handle, _ = sims.turn([user(DOCUMENT)])
        sims.exchange(sims.prefill[0], "/sim/fault", {"kind": "park"})
        longer = [user(DOCUMENT), {"role": "assistant", "content": said}, user("And?")]
        with socket.create_connection((sims.prefill[0].host, sims.prefill[0].port)) as parked:
            body = json.dumps({"messages": longer, "max_tokens": 1, "kv_transfer_params": handle}).encode()
            parked.sendall(
                b"POST %s HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body)
            )
            until(lambda: report(sims.prefill[0], sims)["requests_parked"] == 1)
            sims.prefill_leg(CHAT, {"messages": longer})
        until(lambda: report(sims.prefill[0], sims)["blocks_leaked"] > 0)
        sims.exchange(sims.prefill[0], "/sim/fault", {"kind": "park", "on": False})
        sims.prefill_leg(CHAT, {"messages": longer}, handle)


def test_render_may_be_switched_off() -> None:
    with fleet(scale_out=False) as sims:
        status, body = sims.exchange(sims.prefill[0], f"{CHAT}/render", {"messages": []})
        assert (status, json.loads(body)["error"]["type"]) == (403, "PermissionDeniedError")
    with fleet() as sims:
        sims.exchange(sims.prefill[0], "/sim/fault", {"kind": "no_render"})
        assert sims.exchange(sims.prefill[0], f"{CHAT}/render", {"messages": []})[0] == 403


def test_a_restarted_worker_has_a_new_engine_id_on_the_old_port_and_no_kv() -> None:
    with fleet() as sims:
        said, handle, _ = sims.turn([user(DOCUMENT)])
        port = sims.decode[0].port
        sims.exchange(sims.decode[0], "/sim/fault", {"kind": "restart"})
        until(lambda: sims.decode[0].is_up and sims.decode[0].engine.engine_id != handle["remote_engine_id"])
        assert (sims.decode[0].port, report(sims.decode[0], sims)["live_pins"]) == (port, 0)
        messages = [user(DOCUMENT), {"role": "assistant", "content": said}, user("And?")]
        again, new, _ = sims.turn(messages)
        assert again
        assert report(sims.decode[0], sims)["handles_given"] == 2  # counted over restarts
        assert new["remote_engine_id"] == sims.decode[0].engine.engine_id


def test_a_crashed_worker_resets_its_connections_and_comes_back_when_told_to() -> None:
    with fleet(timing=Timing(decode_tokens_per_second=20)) as sims, ThreadPoolExecutor(1) as pool:
        running = pool.submit(sims.exchange, sims.decode[0], CHAT, {"messages": [user("Hi")], "ignore_eos": True})
        until(lambda: report(sims.decode[0], sims)["running"])
        sims.exchange(sims.decode[0], "/sim/fault", {"kind": "crash", "seconds": 0.2})
        assert isinstance(running.exception(20), (ConnectionError, http.client.HTTPException))
        until(lambda: not sims.decode[0].is_up)
        with pytest.raises(ConnectionError):
            sims.get(sims.decode[0], "/health")
        until(lambda: sims.decode[0].is_up)
        sims.get(sims.decode[0], "/health")


def test_a_dead_engine_answers_500_and_is_not_healthy() -> None:
    with fleet() as sims:
        _, handle, _ = sims.turn([user(DOCUMENT)])
        params = {**handle, "remote_block_ids": [[1]]}
        body = {"messages": [user(DOCUMENT)], "max_tokens": 1, "kv_transfer_params": params}
        assert sims.exchange(sims.prefill[0], CHAT, body)[0] == 500
        assert sims.exchange(sims.prefill[0], CHAT, {"messages": [user("Hi")]})[0] == 500
        assert b"EngineCore" in sims.exchange(sims.prefill[0], CHAT, {"messages": [user("Hi")], "stream": True})[1]
        with pytest.raises(AssertionError):
            sims.get(sims.prefill[0], "/health")


def test_the_clock_may_jump_so_that_retained_blocks_expire(sims: SimClient) -> None:
    sims.turn([user(DOCUMENT)])
    sims.exchange(sims.decode[0], "/sim/clock", {"skip_seconds": 480})
    assert (report(sims.decode[0], sims)["live_pins"], report(sims.decode[0], sims)["handles_expired"]) == (0, 1)


def test_a_fault_nobody_knows_is_refused(sims: SimClient) -> None:
    assert sims.exchange(sims.decode[0], "/sim/fault", {"kind": "sulk"})[0] == 400
    assert sims.exchange(sims.decode[0], "/sim/fault", {"kind": "reset", "often": True})[0] == 400
    assert fault_from_json({"kind": "status", "status": 429}).status == 429
    with pytest.raises(ValueError, match="kind is missing"):
        fault_from_json({})


# --- blocks and clients that leave ----------------------------------------------------------------------------------


def abandon(worker: SimWorker, body: dict[str, Any], after: Callable[[], Any]) -> None:
    """Send a request and reset the connection once ``after()`` is true."""
    payload = json.dumps(body).encode()
    with socket.create_connection((worker.host, worker.port)) as left:
        left.sendall(
            b"POST %s HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(payload), payload)
        )
        until(after)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_and_leaves_no_handle(stream: bool) -> None:
    with fleet(timing=Timing(decode_tokens_per_second=50)) as sims:
        decode = sims.decode[0]
        body = {"messages": [user("Hi")], "stream": stream, "ignore_eos": True, "kv_transfer_params": ALONE}
        abandon(decode, body, lambda: report(decode, sims)["running"])
        until(lambda: not report(decode, sims)["running"])
        assert (report(decode, sims)["free_blocks"], report(decode, sims)["handles_given"]) == (512, 0)


def test_requests_wait_while_retained_blocks_fill_the_worker_and_start_when_they_expire() -> None:
    engine = EngineSettings(
        block_count=20, block_size=16, max_model_len=320, decoder_ttl_seconds=0.3, prefix_caching=False, repaired=True
    )
    with fleet(engine=engine) as sims:
        body = {"prompt": [1] * 250, "max_tokens": 5, "ignore_eos": True, "kv_transfer_params": ALONE}
        sims.post(sims.decode[0], "/v1/completions", body)
        assert report(sims.decode[0], sims)["free_blocks"] == 4
        sims.post(sims.decode[0], "/v1/completions", {**body, "prompt": [2] * 250})
        assert report(sims.decode[0], sims)["handles_expired"] == 1


def test_a_waiting_decode_leg_keeps_the_prefill_workers_blocks_alive() -> None:
    full = EngineSettings(
        block_count=20, block_size=16, max_model_len=320, lease_seconds=0.6, prefix_caching=False, repaired=True
    )
    with fleet(engine=full) as sims, ThreadPoolExecutor(1) as pool:
        body = {"prompt": [1] * 250, "max_tokens": 5, "ignore_eos": True, "kv_transfer_params": ALONE}
        handle = json.loads(sims.post(sims.decode[0], "/v1/completions", body))["kv_transfer_params"]
        passed_on = sims.prefill_leg("/v1/completions", {"prompt": [2] * 250})["kv_transfer_params"]
        waiting = pool.submit(
            sims.post, sims.decode[0], "/v1/completions", {**body, "prompt": [2] * 250, "kv_transfer_params": passed_on}
        )
        time.sleep(1.2)  # two leases
        assert report(sims.prefill[0], sims)["live_leases"] == 1
        sims.prefill_leg("/v1/completions", {"prompt": [0]}, {**handle, "remote_num_tokens": 0})
        waiting.result(20)
        assert report(sims.decode[0], sims)["prompt_tokens_trusted"] == 249


def test_a_client_that_leaves_the_queue_lets_the_prefill_workers_blocks_go() -> None:
    full = EngineSettings(block_count=20, block_size=16, max_model_len=320, prefix_caching=False)
    with fleet(engine=full) as sims:
        body = {"prompt": [1] * 250, "max_tokens": 5, "ignore_eos": True, "kv_transfer_params": ALONE}
        sims.post(sims.decode[0], "/v1/completions", body)
        messages = {"messages": [user("".join(WORDS[:200]))]}
        passed_on = sims.prefill_leg(CHAT, messages)["kv_transfer_params"]
        abandon(
            sims.decode[0],
            {**messages, "kv_transfer_params": passed_on},
            lambda: report(sims.decode[0], sims)["waiting"],
        )
        until(lambda: report(sims.prefill[0], sims)["live_leases"] == 0)


def test_many_requests_at_once_all_get_their_own_answer(sims: SimClient) -> None:
    def ask(number: int) -> str:
        return sims.turn([user(f"{number}{DOCUMENT}")])[0]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [ask(number) for number in range(12)]
    assert sims.total("wrong_kv_turns") == 0


# --- what it records ------------------------------------------------------------------------------------------------


def test_requests_are_recorded_as_they_came(sims: SimClient) -> None:
    sims.exchange(sims.decode[0], CHAT, {"messages": [user("Hi")]}, {"X-KvLoop-Leg": "prefill"})
    (received,) = sims.received(sims.decode)
    assert (received.method, received.path, received.leg) == ("POST", CHAT, "prefill")
    assert received.json["messages"] == [user("Hi")]
    assert report(sims.decode[0], sims)["requests_by_path"] == {CHAT: 1}
    assert report(sims.decode[0], sims)["body_bytes_by_path"] == {CHAT: len(received.body)}


def test_transfer_parameters_without_the_gateways_secret_are_counted() -> None:
    with fleet(secret="s3cret") as sims:
        body = {"messages": [user("Hi")], "kv_transfer_params": ALONE}
        sims.exchange(sims.decode[0], CHAT, body, {"x-kvloop-secret": "s3cret"})
        assert report(sims.decode[0], sims)["unguarded_requests"] == 0
        sims.exchange(sims.decode[0], CHAT, body)
        assert report(sims.decode[0], sims)["unguarded_requests"] == 1


def test_a_digest_says_what_the_handle_covers() -> None:
    with fleet(digests_handles=True) as sims:
        body = {"messages": [user(DOCUMENT)], "return_token_ids": True, "kv_transfer_params": ALONE}
        answer = json.loads(sims.post(sims.decode[0], CHAT, body))
        held = from_json(answer["kv_transfer_params"]["kvloop_digest"])
        ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        assert held is not None
        assert (
            common_prefix(held, ids) == held.length == answer["kv_transfer_params"]["remote_num_tokens"] == len(ids) - 1
        )


def test_time_passes_as_told() -> None:
    timing = Timing(prefill_tokens_per_second=1000, decode_tokens_per_second=100, request_overhead_seconds=0.01)
    assert (timing.prefill_seconds(500), timing.token_delay_seconds) == (0.5, 0.01)
    assert (Timing().prefill_seconds(500), Timing().token_delay_seconds) == (0.0, 0.0)
    with fleet(timing=timing) as sims:
        started = time.monotonic()
        sims.post(sims.decode[0], "/v1/completions", {"prompt": [1] * 100, "max_tokens": 6, "ignore_eos": True})
        assert time.monotonic() - started >= 0.15  # it may take longer, never shorter


def test_attention_tokenising_and_transfers_take_their_time() -> None:
    timing = Timing(
        prefill_tokens_per_second=1000,
        attention_pairs_per_second=1000,
        tokenise_tokens_per_second=1000,
        transfer_bytes_per_second=2_000_000,
        kv_bytes_per_token=1000,
    )
    # Four tokens after ten others look at 11, 12, 13 and 14.
    assert timing.prefill_seconds(4, 10) == pytest.approx(0.004 + 0.050)
    assert (timing.tokenise_seconds(100), timing.transfer_seconds(100)) == (0.1, 0.05)
    assert (Timing().tokenise_seconds(100), Timing().transfer_seconds(100)) == (0.0, 0.0)
    slow = Timing(tokenise_tokens_per_second=1000, transfer_bytes_per_second=2_000_000, kv_bytes_per_token=1000)
    with fleet(timing=slow) as sims:
        started = time.monotonic()
        prompt = "".join(WORDS[:200])
        passed_on = sims.prefill_leg("/v1/completions", {"prompt": prompt})["kv_transfer_params"]
        tokenised = time.monotonic()
        sims.post(
            sims.decode[0], "/v1/completions", {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": passed_on}
        )
        assert tokenised - started >= 0.2
        assert time.monotonic() - tokenised >= 0.2 + 0.1


def test_data_parallel_ranks_share_an_api_and_nothing_else() -> None:
    with fleet(data_parallel_size=2) as sims:
        body = {"prompt": [1] * 100, "max_tokens": 2, "ignore_eos": True, "kv_transfer_params": ALONE}
        handles = []
        for rank in ("0", "1", "1"):
            named = {"x-data-parallel-rank": rank}
            status, answer = sims.exchange(sims.decode[0], "/v1/completions", body, named)
            assert status == 200
            handles.append(json.loads(answer)["kv_transfer_params"])
        ids = [handle["remote_engine_id"] for handle in handles]
        assert ids[1] == ids[2] != ids[0]
        assert [name.rpartition("_")[2] for name in ids] == ["dp0", "dp1", "dp1"]
        assert handles[0]["remote_port"] != handles[1]["remote_port"] == handles[2]["remote_port"]
        # Both ranks count their blocks alike, so the same numbers mean other blocks on the other rank.
        assert handles[0]["remote_block_ids"] == handles[1]["remote_block_ids"]
        assert report(sims.decode[0], sims)["live_pins"] == 3
        longer = {"prompt": [1] * 100 + [2] * 9}
        sims.prefill_leg("/v1/completions", longer, handles[1])
        shown = report(sims.decode[0], sims)
        assert (shown["live_pins"], shown["handles_read"], shown["handles_used_twice"]) == (2, 1, 0)
        wrong = sims.exchange(sims.decode[0], "/v1/completions", body, {"x-data-parallel-rank": "2"})
        assert wrong[0] == 400
        metrics = sims.get(sims.decode[0], "/metrics").decode()
        assert metrics.count("vllm:num_requests_running{") == 2


def test_a_model_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="would wait for ever"):
        WorkerSettings(role="decode", engine=EngineSettings(block_count=2, block_size=16, max_model_len=33))


def test_the_command_line_starts_a_fleet_and_stops_on_sigterm() -> None:
    options = ["--port", "0", "--plugin", "--decode-workers", "2"]
    argv = [sys.executable, "-m", "extproc.cli", "sim", "fleet", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command line
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(3)]
        process.terminate()
        assert process.wait(20) == 0
    assert [line[0] for line in lines] == ["prefill", "decode", "decode"]
    assert len({line[1] for line in lines}) == 3


def test_the_command_line_names_a_port_it_cannot_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [sys.executable, "-m", "extproc.cli", "sim", "decode", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - our own command line
    assert (done.returncode, "choose another --port" in done.stderr) == (2, True)
