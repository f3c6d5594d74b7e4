"""Tenants share nothing, handles come only from where they may, and what clients say is written down nowhere."""

from __future__ import annotations

import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gateway_harness import Chat, Gateway, worker
from otlp_collector import Collector

from workers.sim.text import WORDS

DOCUMENT = "".join(WORDS[1000:1150])
PATH = "/v1/chat/completions"


def test_hazard_09_fifty_tenants_with_one_id_and_one_text_each_reuse_their_own_turns_only(gateway) -> None:
    chats = {f"tenant-{number}": Chat(gateway, "the-same-id") for number in range(50)}

    def say(tenant: str) -> Any:
        return chats[tenant].say("And then?" if chats[tenant].messages else DOCUMENT, tenant=tenant, max_tokens=20)

    outcomes = []
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            answers = list(pool.map(say, chats))
            outcomes.append({(answer.status, answer.outcome, answer.reason) for answer in answers})
            assert len({answer.text for answer in answers}) == 1, "the same question, so the same right answer"
    assert outcomes == [{(200, "cold", "nothing_kept")}, {(200, "reused", None)}, {(200, "reused", None)}]
    # By the requests themselves: what a tenant's leg read is what a tenant's turn had left.
    born_of = {
        received.headers["x-request-id"]: received.headers["authorization"]
        for received in gateway.received("decode", path=PATH)
    }
    reads = [r for r in gateway.received("prefill", leg="prefill") if b'"remote_request_id"' in r.body]
    assert len(reads) == 100
    for read in reads:
        handle = read.json["kv_transfer_params"]["remote_request_id"]
        (owner,) = [tenant for request_id, tenant in born_of.items() if request_id in handle]
        assert owner == read.headers["authorization"]


def test_a_handle_that_names_a_foreign_host_is_stripped_not_kept_counted_and_told_once(start_gateway) -> None:
    foreign = worker("decode", advertised_host="192.0.2.7")
    gateway = start_gateway(decode=[foreign], extproc_env={"KVLOOP_HANDLE_HOSTS": '["10.0.0.0/8", "*.pool"]'})
    chat = gateway.new_chat()
    for _ in range(3):
        answer = chat.say(DOCUMENT)
        assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")
        assert not {"remote_host", "remote_block_ids", "kvloop_digest"} & answer.told()
        assert b"192.0.2.7" not in answer.raw
    assert 'kvloop_handles_captured_total{fate="foreign_host"} 3.0' in gateway.metrics()
    assert gateway.extproc[0].output().count("handle_with_foreign_host") == 1
    assert not [r for r in gateway.received("prefill") if b"192.0.2.7" in r.body], "P was sent nowhere"


# --- nothing is written down --------------------------------------------------------------------------------------------

MARKS = {
    "prompt": "PROMPTMARK81f3",
    "id": "CONVERSATIONMARK77aa",
    "key": "BEARERMARK5c0d",
    "query": "QUERYMARK19be",
    "field": "FIELDMARK42cd",
    "model": "MODELMARK06ef",
    "injected": "INJECTEDMARK93ab",
    "user agent": "AGENTMARK2d2d",
    "api key": "APIKEYMARK8e8e",
}


def ask(gateway: Gateway, body: Any, *, query: str = "", **headers: str) -> tuple[int, bytes]:
    """Ask as a client whose every part is marked."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    marked = {
        "x-conversation-id": MARKS["id"],
        "authorization": f"Bearer {MARKS['key']}",
        "user-agent": MARKS["user agent"],
        "cookie": f"session={MARKS['key']}",
    }
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.suppress(OSError, http.client.HTTPException):
        answer = gateway.request("POST", f"{PATH}?{query or MARKS['query']}", payload, {**marked, **named})
        return answer.status, answer.raw
    return 0, b""


def chat_body(**fields: Any) -> dict[str, Any]:
    prompt = f"{MARKS['prompt']} {DOCUMENT}"
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": 10,
        **fields,
    }


def strike(gateway: Gateway, role: str, kind: str, **fault: Any) -> None:
    for each in gateway.fleet.prefill if role == "prefill" else gateway.fleet.decode:
        gateway.fleet.strike(each, kind, times=1, **fault)


def play_everything(gateway: Gateway) -> set[int]:
    """Take every path an error can take, and the usual ones."""
    statuses = [ask(gateway, chat_body())[0] for _ in range(3)]
    statuses += [ask(gateway, chat_body(stream=False, user=MARKS["field"]))[0]]
    statuses += [ask(gateway, chat_body(model=MARKS["model"]))[0]]
    statuses += [ask(gateway, f'{{"messages": "{MARKS["prompt"]}'.encode())[0]]
    statuses += [ask(gateway, f'["{MARKS["prompt"]}"]'.encode())[0]]
    statuses += [ask(gateway, b'{"%s":' % MARKS["field"].encode() * 2000)[0]]
    statuses += [ask(gateway, chat_body(), content_encoding=MARKS["field"])[0]]
    statuses += [ask(gateway, chat_body(), x_conversation_id=MARKS["id"] * 40)[0]]
    statuses += [ask(gateway, chat_body(padding=MARKS["field"] * 100_000))[0]]
    params = {"remote_host": MARKS["injected"], "do_remote_prefill": True}
    statuses += [ask(gateway, chat_body(kv_transfer_params=params, vllm_xargs={"kv_transfer_params": params}))[0]]
    for role, fault in (
        ("prefill", {"kind": "status", "status": 500, "leg": "prefill"}),
        ("prefill", {"kind": "reset", "leg": "prefill"}),
        ("prefill", {"kind": "stall", "leg": "prefill", "seconds": 1.0}),
        ("prefill", {"kind": "status", "status": 500, "leg": "render"}),
        ("decode", {"kind": "reset", "path": PATH}),
        ("decode", {"kind": "status", "status": 500, "path": PATH}),
        ("decode", {"kind": "truncate", "path": PATH, "after_events": 2, "seconds": 0.1}),
    ):
        strike(gateway, role, **fault)
        statuses += [ask(gateway, chat_body())[0]]
    # Held to be stripped, and more than may be held: the stream is aborted.
    large = {"stream": False, "max_tokens": 400, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
    statuses += [ask(gateway, chat_body(**large))[0]]
    gateway.abandon(MARKS["id"], chat_body()["messages"], 0.01, user=MARKS["field"])
    return set(statuses)


def test_hazard_09_secrets_and_words_are_in_no_log_metric_trace_or_error_of_another(start_gateway) -> None:
    with Collector() as collector:
        gateway = start_gateway(
            extproc_env={
                "KVLOOP_LOG_LEVEL": "debug",
                "KVLOOP_TURN_LOG_LEVEL": "info",
                "KVLOOP_REUSE_TIMEOUT_SECONDS": "0.5",
                "KVLOOP_PREFILL_TIMEOUT_SECONDS": "0.5",
                "KVLOOP_REQUEST_MAX_BYTES": "1000000",
                "KVLOOP_RESPONSE_MAX_BYTES": "20000",
                "KVLOOP_WORKER_API_KEY": MARKS["api key"],
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc_endpoint,
                "OTEL_BSP_SCHEDULE_DELAY": "50",
            },
        )
        said = gateway.right_text(chat_body()["messages"], max_tokens=10)
        statuses = play_everything(gateway)
        assert {200, 400, 404, 413, 415, 503} <= statuses, statuses
        stranger = [
            gateway.chat("other", "no list", tenant="other"),
            gateway.chat("other", [], model="x", tenant="other"),
        ]
        assert {answer.status for answer in stranger} <= {400, 404}
        gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics())
        written = {
            "metrics": gateway.metrics(),
            "state": gateway._get(gateway._extproc_ports[0][1], "/debug/state")[1],
            "Envoy's statistics": gateway._get(gateway.admin_port, "/stats")[1],
            "errors of another": "".join(f"{answer.raw!r}{answer.headers}" for answer in stranger),
        }
        gateway.until(lambda: collector.raw, "spans have arrived")
        gateway.stop_extproc()
        written["traces"] = repr(collector.raw)
    written |= {path.name: path.read_text(errors="replace") for path in gateway.directory.glob("*.log")}
    assert {"access.log", "envoy.log", "extproc-0.log"} <= set(written)
    assert "prefill_timeout" in written["extproc-0.log"], "the turns are in the log"
    assert "ResponseTooLarge" in written["extproc-0.log"]
    secrets = {**MARKS, "the worker secret": gateway.secret, "the answer": said[3:40]}
    leaks = [(what, where) for what, secret in secrets.items() for where, text in written.items() if secret in text]
    # A trace names the model that was asked for, as OpenTelemetry's conventions for generative AI want it.
    assert leaks == [("model", "traces")]
