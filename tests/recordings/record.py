"""Record what real vLLM workers answer, byte for byte: ``python tests/recordings/record.py`` (about 3 minutes, 2 cores).

Starts a prefill worker and, one after the other, decode workers without the plugin, with its stream part only, and with
both parts; plays every leg as kvloop does and writes each response body to ``<mode>/<name>.http-body``, with what was
asked and answered around it in ``index.json``.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workers.launch import worker_command
from workers.models import prepare_tiny

HERE = Path(__file__).parent
MODEL_FLAGS = ("--dtype", "float32", "--max-model-len", "8192", "--disable-uvicorn-access-log")
START_SECONDS = 180
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
QUESTION = [{"role": "user", "content": "Name a colour, a fruit and a river. Keep it short, please, one line each."}]
LONG_QUESTION = [{"role": "user", "content": "The tide comes in, the tide goes out. " * 17}]
PROMPT = "In the beginning there was a prompt of about ninety bytes, and a worker had to continue it:"
STOP_STRINGS = {"chat": "Wg", "completions": "7."}
"""Two characters in the middle of what the tiny model answers to ``QUESTION`` and ``PROMPT``."""

Index = dict[str, dict[str, Any]]


class Worker:
    """One running worker."""

    def __init__(self, role: Any, model: Path, core: int, **options: Any) -> None:
        self.port, side_channel_port = free_port(), free_port()
        command = worker_command(
            role, str(model), device="cpu", port=self.port, side_channel_port=side_channel_port,
            served_model_name="tiny", cpu_core=core, extra=MODEL_FLAGS, **options,
        )  # fmt: skip
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self.process = subprocess.Popen(  # noqa: S603
            command.argv, env={**os.environ, **command.env}, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                time.sleep(0.5)
        self.log.seek(0)
        sys.exit(f"worker did not start:\n{self.log.read()[-4000:].decode(errors='replace')}")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, answer

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Recorder:
    """Writes bodies and remembers what belongs to them."""

    def __init__(self) -> None:
        self.index: Index = {}

    def record(self, name: str, worker: Worker, path: str, body: Any = None, method: str = "POST", **facts: Any) -> Any:
        status, headers, answer = worker.ask(method, path, body)
        return self.write(
            name, answer,
            method=method, path=path, request=body, status=status, content_type=headers.get("content-type"), **facts,
        )  # fmt: skip

    def write(self, name: str, answer: bytes, **facts: Any) -> Any:
        target = HERE / f"{name}.http-body"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(answer)
        self.index[name] = facts
        print(f"{facts['status']} {len(answer):6d} B {name}", file=sys.stderr)
        return json.loads(answer) if facts["content_type"] == "application/json" else answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def record_prefill(recorder: Recorder, prefill: Worker, decode: Worker) -> None:
    render = recorder.record("prefill/render-chat", prefill, "/v1/chat/completions/render",
                             {"model": "tiny", "messages": QUESTION})  # fmt: skip
    recorder.record(
        "prefill/render-completions", prefill, "/v1/completions/render", {"model": "tiny", "prompt": PROMPT}
    )
    recorder.record("prefill/chat-cold", prefill, "/v1/chat/completions", chat_leg(QUESTION, render["token_ids"]))
    cold = recorder.record(
        "prefill/completions-cold", prefill, "/v1/completions", completions_leg(ids_of(prefill, PROMPT))
    )
    turn = decode.ask("POST", "/v1/completions", {
        "model": "tiny", "prompt": ids_of(prefill, PROMPT), "max_tokens": 12, "temperature": 0,
        "return_token_ids": True, "kv_transfer_params": cold["kv_transfer_params"],
    })  # fmt: skip
    answer = json.loads(turn[2])
    longer = [*ids_of(prefill, PROMPT), *answer["choices"][0]["token_ids"], *ids_of(prefill, " And then?")]
    recorder.record("prefill/completions-with-handle", prefill, "/v1/completions",
                    completions_leg(longer, answer["kv_transfer_params"]))  # fmt: skip
    _, handle, sequence = chat_turn(prefill, decode, QUESTION)
    recorder.record("prefill/chat-with-handle", prefill, "/v1/chat/completions",
                    chat_leg(QUESTION, [*sequence, *ids_of(prefill, "<|im_end|>\n")], handle))  # fmt: skip
    recorder.record("prefill/models", prefill, "/v1/models", method="GET")
    recorder.record("prefill/error-400", prefill, "/v1/chat/completions", {"model": "tiny", "messages": "no list"})
    recorder.record("prefill/error-400-too-long", prefill, "/v1/completions",
                    {"model": "tiny", "prompt": [65] * 9000, "max_tokens": 1})  # fmt: skip
    recorder.record("prefill/error-404-model", prefill, "/v1/chat/completions",
                    {"model": "nobody", "messages": QUESTION})  # fmt: skip
    recorder.record("prefill/error-404-path", prefill, "/v1/nowhere", {"model": "tiny"})
    metrics = decode.ask("GET", "/metrics")[2].decode()
    wanted = re.compile(r"^(# (HELP|TYPE) )?vllm:(cache_config_info|kv_cache_usage_perc)\b.*\n", re.MULTILINE)
    excerpt = "".join(match[0] for match in wanted.finditer(metrics)).encode()
    recorder.write("prefill/metrics-excerpt", excerpt, method="GET", path="/metrics", request=None, status=200,
                   content_type="text/plain; version=0.0.4; charset=utf-8", note="two metrics only, of D")  # fmt: skip


def record_decode(recorder: Recorder, mode: str, prefill: Worker, decode: Worker, *, token_ids: bool) -> None:
    """Record one decode worker's answers; ``token_ids`` asks for them, as kvloop does where no digest is offered."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "usage": {"stream_options": {"include_usage": True}},
        "continuous-usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "logprobs": {},
        "stop-token": {"min_tokens": 6, "logit_bias": {"257": 100}},
        "stop-string": {},
    }
    asked = {"return_token_ids": True} if token_ids else {}
    for api in ("chat", "completions"):
        for stream in (True, False):
            for variant, fields in variants.items():
                if "stream_options" in fields and not stream:
                    continue
                name = f"{mode}/{api}-{'stream' if stream else 'full'}-{variant}"
                if variant == "stop-string":
                    fields = {"stop": [STOP_STRINGS[api]]}  # noqa: PLW2901
                if variant == "logprobs":
                    fields = {"logprobs": True, "top_logprobs": 2} if api == "chat" else {"logprobs": 2}  # noqa: PLW2901
                body = {"model": "tiny", "max_tokens": 16, "temperature": 0, "stream": stream, **asked, **fields}
                record_turn(recorder, name, prefill, decode, api, body)
    long = {"model": "tiny", "max_tokens": 8, "temperature": 0, "stream": True, **asked}
    record_turn(recorder, f"{mode}/chat-stream-long-prompt", prefill, decode, "chat", long, LONG_QUESTION)
    several = {"model": "tiny", "max_tokens": 4, "temperature": 1, "seed": 1, "stream": True, "n": 2, **asked}
    recorder.record(f"{mode}/chat-stream-two-choices", decode, "/v1/chat/completions",
                    {**several, "messages": QUESTION, "kv_transfer_params": {**PREFILL, "do_remote_decode": False}},
                    note="no prefill leg")  # fmt: skip


def record_turn(  # noqa: PLR0917
    recorder: Recorder,
    name: str,
    prefill: Worker,
    decode: Worker,
    api: str,
    body: dict[str, Any],
    messages: Any = QUESTION,
) -> None:
    """Play the prefill leg and record the decode leg."""
    if api == "chat":
        ids = render_ids(prefill, messages)
        handle = json.loads(prefill.ask("POST", "/v1/chat/completions", chat_leg(messages, ids))[2])[
            "kv_transfer_params"
        ]
        leg = {"messages": messages, "kv_transfer_params": {**handle, "prompt_token_ids": ids}}
        path = "/v1/chat/completions"
    else:
        ids = ids_of(prefill, PROMPT)
        handle = json.loads(prefill.ask("POST", "/v1/completions", completions_leg(ids))[2])["kv_transfer_params"]
        leg = {"prompt": ids, "kv_transfer_params": handle}
        path = "/v1/completions"
    recorder.record(name, decode, path, {**body, **leg}, prompt_token_ids=ids)


def chat_leg(messages: Any, ids: list[int], handle: dict[str, Any] | None = None) -> dict[str, Any]:
    kv = {**(handle or {}), **PREFILL, "prompt_token_ids": ids}
    return {"model": "tiny", "messages": messages, "max_tokens": 1, "stream": False, "return_token_ids": True,
            "kv_transfer_params": kv}  # fmt: skip


def completions_leg(ids: list[int], handle: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"model": "tiny", "prompt": ids, "max_tokens": 1, "stream": False, "return_token_ids": True,
            "kv_transfer_params": {**(handle or {}), **PREFILL}}  # fmt: skip


def chat_turn(prefill: Worker, decode: Worker, messages: Any) -> tuple[bytes, dict[str, Any], list[int]]:
    ids = render_ids(prefill, messages)
    leg = json.loads(prefill.ask("POST", "/v1/chat/completions", chat_leg(messages, ids))[2])
    answer = decode.ask("POST", "/v1/chat/completions", {
        "model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0, "return_token_ids": True,
        "kv_transfer_params": {**leg["kv_transfer_params"], "prompt_token_ids": ids},
    })[2]  # fmt: skip
    parsed = json.loads(answer)
    return answer, parsed["kv_transfer_params"], [*ids, *parsed["choices"][0]["token_ids"]]


def render_ids(worker: Worker, messages: Any) -> list[int]:
    answer = worker.ask("POST", "/v1/chat/completions/render", {"model": "tiny", "messages": messages})[2]
    return list(json.loads(answer)["token_ids"])


def ids_of(worker: Worker, text: str) -> list[int]:
    return list(json.loads(worker.ask("POST", "/tokenize", {"model": "tiny", "prompt": text})[2])["tokens"])


def write_as_033(recorder: Recorder, api: str) -> None:
    """Derive what vLLM 0.33 would have streamed: a null handle on every chunk of its main loop but the finish chunk."""
    source = f"stream-handle/{api}-stream-usage"
    events = (HERE / f"{source}.http-body").read_bytes().split(b"\n\n")
    for position, event in enumerate(events):
        in_main_loop = b'"choices":[{' in event and b'"role":' not in event
        if in_main_loop and b'"kv_transfer_params"' not in event:
            events[position] = event[:-1] + b',"kv_transfer_params":null}'
    facts = recorder.index[source]
    recorder.write(f"derived-0.33/{api}-stream-usage", b"\n\n".join(events), **facts, note=f"derived from {source}")


def main() -> None:
    recorder = Recorder()
    model = prepare_tiny(Path(tempfile.gettempdir()) / "kvloop-tiny")
    modes = {
        "stock": ({"stream_handle": False, "digest": False}, True),
        "stream-handle": ({"stream_handle": True, "digest": False}, True),
        "digest": ({"stream_handle": True, "digest": True}, False),
    }
    # Without its prefix cache P really reads: with it, these short prompts would be local hits for the most part.
    prefill = Worker("prefill", model, core=0, prefix_caching=False)
    try:
        for mode, (options, token_ids) in modes.items():
            decode = Worker("decode", model, core=1, **options)
            try:
                prefill.wait()
                decode.wait()
                if mode == "stock":
                    record_prefill(recorder, prefill, decode)
                record_decode(recorder, mode, prefill, decode, token_ids=token_ids)
            finally:
                decode.stop()
    finally:
        prefill.stop()
    for api in ("chat", "completions"):
        write_as_033(recorder, api)
    lines = (f"{json.dumps(name)}: {json.dumps(facts, ensure_ascii=False)}" for name, facts in recorder.index.items())
    (HERE / "index.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
