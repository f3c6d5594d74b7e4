"""The vLLM plugin and the guard on real workers, asked directly, round the gateway."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from loop_client import MODEL

from extproc.proof import fingerprint, from_json
from workers.stack import Stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE_ALONE = {"do_remote_decode": False, "do_remote_prefill": False}
MESSAGES = [{"role": "user", "content": "The lighthouse keeper counts the ships that pass at night. " * 3}]
END_OF_SEQUENCE = 257
WAIT_SECONDS = 60.0


class Workers:
    """The stack's two workers, with the secret and without."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.trusted = httpx.Client(timeout=60, headers={"x-kvloop-secret": stack.secret})
        self.stranger = httpx.Client(timeout=60)

    def ask(self, role: Any, path: str, body: dict[str, Any], client: httpx.Client | None = None) -> dict[str, Any]:
        answer = (client or self.trusted).post(self.stack.url(role) + path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, role: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.trusted.post(self.stack.url(role) + path, json={"model": MODEL, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]

    def prefill(self, prompt: list[int], handle: dict[str, Any] | None = None) -> dict[str, Any]:
        """Play a prefill leg and return its transfer parameters."""
        params = {**(handle or {}), **PREFILL}
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
        return self.ask("prefill", COMPLETIONS, body)["kv_transfer_params"]

    def turn(self, prompt: list[int], **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """Play both legs of a turn; returns the generated ids and D's handle."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "max_tokens": 20, **fields}
        answer = self.ask("decode", COMPLETIONS, {"kv_transfer_params": self.prefill(prompt), **body})
        return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]


@pytest.fixture
def workers(stack: Stack) -> Iterator[Workers]:
    stack.check()
    workers = Workers(stack)
    yield workers
    workers.trusted.close()
    workers.stranger.close()


@pytest.fixture
def prompt() -> list[int]:
    """A prompt nobody used, several blocks long and none of them whole."""
    return list((secrets.token_hex(40) + " and " + secrets.token_hex(17)).encode())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.2)


def with_digest(workers: Workers) -> bool:
    return bool(workers.stack.options.decode["digest"])


# --- the handle in streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_hazard_33_34_the_finish_chunk_of_a_stream_carries_the_handle_and_no_other_chunk_does(
    workers: Workers, prompt: list[int], path: str
) -> None:
    params = {**workers.prefill(prompt), **({"prompt_token_ids": prompt} if path == CHAT else {})}
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": prompt}
    usage = {"stream_options": {"include_usage": True}}
    events = workers.events("decode", path, {**asked, **usage, "max_tokens": 9, "kv_transfer_params": params})
    finish, last = events[-2], events[-1]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert finish["kv_transfer_params"]["do_remote_decode"] is True
    assert finish["kv_transfer_params"]["remote_num_tokens"] == len(prompt) + 9 - 1
    assert last["usage"]["completion_tokens"] == 9
    assert last["choices"] == []
    assert [event.get("kv_transfer_params") for event in (*events[:-2], last)] == [None] * (len(events) - 1)


def test_a_stream_without_transfer_parameters_carries_no_handle(workers: Workers, prompt: list[int]) -> None:
    events = workers.events("decode", COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
    assert [event.get("kv_transfer_params") for event in events] == [None] * len(events)


# --- the digest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "ending",
    [{"max_tokens": 1}, {"max_tokens": 40}, {"min_tokens": 7, "logit_bias": {str(END_OF_SEQUENCE): 100}}],
    ids=["one-token", "length", "end-of-sequence"],
)
def test_the_digest_is_that_of_the_prompt_and_the_generated_ids(
    workers: Workers, prompt: list[int], ending: dict[str, Any], *, stream: bool
) -> None:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 64, "return_token_ids": True, **ending}
    body["kv_transfer_params"] = workers.prefill(prompt)
    answers = workers.events("decode", COMPLETIONS, body) if stream else [workers.ask("decode", COMPLETIONS, body)]
    generated = [token for answer in answers for token in answer["choices"][0]["token_ids"]]
    handle = answers[-1]["kv_transfer_params"]
    held = (prompt + generated)[: handle["remote_num_tokens"]]
    assert len(held) == handle["remote_num_tokens"] >= len(prompt)
    if with_digest(workers):
        assert from_json(handle["kvloop_digest"]) == fingerprint(held)
    else:
        assert "kvloop_digest" not in handle


def test_the_digest_names_the_block_size_the_worker_reports(workers: Workers, prompt: list[int]) -> None:
    _, handle = workers.turn(prompt)
    metrics = httpx.get(workers.stack.url("decode") + "/metrics").text
    config = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{"))
    named = handle.get("kvloop_digest", {}).get("block_size")
    assert named == (32 if with_digest(workers) else None)
    assert ',block_size="32",' in config


def test_a_prefill_worker_adds_no_digest(workers: Workers, prompt: list[int]) -> None:
    assert "kvloop_digest" not in workers.prefill(prompt)


# --- the repairs --------------------------------------------------------------------------------------------------


def test_a_prefill_worker_computes_what_a_dead_decode_worker_cannot_give(workers: Workers, prompt: list[int]) -> None:
    generated, handle = workers.turn(prompt)
    longer = [*prompt, *generated, *b" And now?"]
    body = {"prompt": longer, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    cold = workers.ask("prefill", COMPLETIONS, body)
    dead = {**handle, **PREFILL, "remote_engine_id": "00000000-0000-4000-8000-000000000000"}
    answer = workers.ask("prefill", COMPLETIONS, {**body, "kv_transfer_params": dead})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == cold["choices"][0]["logprobs"]["top_logprobs"]
    assert answer["kv_transfer_params"]["remote_prefill_cached_tokens"] == 0


def test_what_a_prefill_worker_reads_back_gives_the_same_next_token(workers: Workers, prompt: list[int]) -> None:
    generated, handle = workers.turn(prompt)
    longer = [*prompt, *generated, *b" And now?"]
    body = {"prompt": longer, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    cold = workers.ask("prefill", COMPLETIONS, body)
    answer = workers.ask("prefill", COMPLETIONS, {**body, "kv_transfer_params": {**handle, **PREFILL}})
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == pytest.approx(
        cold["choices"][0]["logprobs"]["top_logprobs"][0], abs=1e-3
    )
    assert answer["kv_transfer_params"]["remote_prefill_cached_tokens"] == handle["remote_num_tokens"]


def test_a_turn_of_the_decode_worker_alone_is_kept_and_let_go(workers: Workers, prompt: list[int]) -> None:
    before = workers.stack.kv_cache_usage("decode")
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "kv_transfer_params": DECODE_ALONE}
    handle = workers.ask("decode", COMPLETIONS, body)["kv_transfer_params"]
    wait_until(lambda: workers.stack.kv_cache_usage("decode") > before)
    workers.prefill([65], {**handle, "remote_num_tokens": 0})
    wait_until(lambda: workers.stack.kv_cache_usage("decode") == before)


# --- the guard ------------------------------------------------------------------------------------------------------

SMUGGLED = [
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "kv_transfer_params": {}, "kv_transfer_params": null}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "\\u006bv_transfer_params": {"do_remote_decode": true}}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "ec_transfer_params": {}}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "vllm_xargs": {"kv_transfer_params": "x"}}',
    '{"model": "tiny", "prompt": "a", "max_tokens": 1, "kv_transfer_params": {}}'.encode("utf-16"),
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("body", SMUGGLED)
@pytest.mark.parametrize("secret", [None, "wrong"])
def test_nobody_but_the_gateway_sets_transfer_parameters(
    workers: Workers, role: Any, body: bytes, secret: str | None
) -> None:
    headers = {"content-type": "application/json"} | ({"x-kvloop-secret": secret} if secret else {})
    answer = workers.stranger.post(workers.stack.url(role) + COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "kvloop_secret"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/inference/v1/generate", "/v1/messages", "/nowhere"])
def test_every_path_is_guarded(workers: Workers, path: str) -> None:
    body = b'{"model": "tiny", "kv_transfer_params": {}}'
    headers = {"content-type": "application/json"}
    assert workers.stranger.post(workers.stack.url("decode") + path, content=body, headers=headers).status_code == 403


def test_a_body_without_transfer_parameters_reaches_vllm_unharmed_whole_or_in_chunks(workers: Workers) -> None:
    url = workers.stack.url("decode") + CHAT
    talk = [{"role": "user", "content": 'what does "kv_transfer_params" mean? ' * 50}]
    body = json.dumps({"model": MODEL, "messages": talk, "max_tokens": 5, "temperature": 0}).encode()
    cut = (body[start : start + 100] for start in range(0, len(body), 100))
    headers = {"content-type": "application/json"}
    answers = [
        client.post(url, content=content, headers=headers).json()
        for client, content in ((workers.trusted, body), (workers.stranger, body), (workers.stranger, cut))
    ]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5, 5]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


def test_a_guarded_stream_ends_when_its_client_leaves(workers: Workers, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 30000, "ignore_eos": True, "stream": True}
    with workers.stranger.stream("POST", workers.stack.url("decode") + COMPLETIONS, json=body) as answer:
        first = next(answer.iter_lines())
    assert first.startswith("data: {")
    wait_until(lambda: workers.stack.metrics("decode")["vllm:num_requests_running"] == 0)


# --- NIXL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nixl_is_calmed_on_both_workers(workers: Workers, role: Any) -> None:
    assert "NIXL's progress thread sleeps 1000 us" in workers.stack.log(role).read_text()
