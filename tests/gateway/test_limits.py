"""Each limit of docs/limits.md, where only the real Envoy or the real ext_proc can show it; and how overload is met."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gateway_harness import Answer, Gateway, worker

from workers.sim.settings import Timing

HI = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def is_honest(answer: Answer, code: str) -> bool:
    """Whether an answer is an error as OpenAI's SDKs read it, with the time to come again."""
    error = answer.json["error"]
    return error["code"] == code and bool(error["message"]) and int(answer.headers["retry-after"]) > 0


def stall(gateway: Gateway, workers: list[Any], **fault: Any) -> None:
    for each in workers:
        gateway.fleet.strike(each, "stall", **fault)


def go_on(gateway: Gateway) -> None:
    gateway.fleet.call(lambda: [each.clear_faults() for each in gateway.fleet.workers])


@pytest.mark.parametrize("bound", ["KVLOOP_MAX_PREPARING_REQUESTS", "KVLOOP_MAX_REQUESTS"])
def test_more_than_can_be_served_is_refused_at_once_and_the_others_are_served(start_gateway, bound: str) -> None:
    gateway = start_gateway(extproc_env={bound: "4"})
    stall(gateway, gateway.fleet.prefill, leg="prefill")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(gateway.chat, f"c{at}", HI) for at in range(4)]
        gateway.until(lambda: "kvloop_preparing_requests 4.0" in gateway.metrics())
        refused = [gateway.chat(f"more-{at}", HI, x_padding="p" * 300_000) for at in range(10)]
        go_on(gateway)
        served = [each.result() for each in waiting]
    assert [answer.status for answer in refused] == [503] * 10
    assert all(is_honest(answer, "overloaded") for answer in refused)
    assert 'kvloop_turns_total{outcome="refused",reason="overloaded"} 10.0' in gateway.metrics()
    assert [answer.status for answer in served] == [200] * 4
    assert len(gateway.received("prefill", leg="prefill")) == 4, "P has seen none of what was refused"
    assert gateway.chat("afterwards", HI).status == 200


def test_answers_being_streamed_do_not_count_as_waiting_for_their_prefill(start_gateway) -> None:
    slow = worker("decode", timing=Timing(decode_tokens_per_second=40))
    gateway = start_gateway(decode=[slow], extproc_env={"KVLOOP_MAX_PREPARING_REQUESTS": "1"})
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(gateway.chat, "c", HI, max_tokens=60, ignore_eos=True)
        gateway.until(lambda: gateway.received("decode", path=PATH) and "preparing_requests 0.0" in gateway.metrics())
        assert gateway.chat("d", HI, max_tokens=1).status == 200
        assert not streaming.done()
        assert streaming.result().is_done


def test_envoy_refuses_what_the_decode_pool_may_not_get(start_gateway) -> None:
    gateway = start_gateway(envoy={"max_decode_requests": 1})
    stall(gateway, gateway.fleet.decode, path=PATH)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.chat, "c", HI)
        gateway.until(lambda: gateway.received("decode", path=PATH))
        refused = gateway.chat("d", HI)
        go_on(gateway)
        assert waiting.result().status == 200
    assert refused.status == 503
    assert is_honest(refused, "service_unavailable")
    assert len(gateway.received("decode", path=PATH)) == 1


def test_where_the_prefill_pool_may_get_no_more_d_serves_alone(start_gateway) -> None:
    gateway = start_gateway(envoy={"max_prefill_requests": 1})
    gateway.chat("a", HI)
    stall(gateway, gateway.fleet.prefill, leg="prefill")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.chat, "c", HI)
        gateway.until(lambda: gateway.report()["faults_struck"])
        shed = gateway.chat("d", HI)
        go_on(gateway)
        assert waiting.result().status == 200
    assert (shed.status, shed.outcome, shed.reason) == (200, "decode_only", "prefill_failed")


def test_an_envoy_without_memory_left_refuses_new_requests_in_words(start_gateway) -> None:
    gateway = start_gateway(envoy={"max_heap_bytes": 1024 * 1024})
    refused = gateway.until(lambda: (answer := gateway.chat("c", HI)).status == 503 and answer)
    assert is_honest(refused, "service_unavailable")


def error_code(raw: bytes) -> str:
    """The code of the error in an answer's bytes."""
    return str(json.JSONDecoder().raw_decode(raw[raw.index(b"{") :].decode())[0]["error"]["code"])


def chat_requests(gateway: Gateway) -> int:
    return len(gateway.received("decode", path=PATH))


@pytest.mark.parametrize(
    "headers", [{"x-long": "h" * 70_000}, {f"x-{at}": "h" for at in range(101)}], ids=["long", "many"]
)
def test_too_many_headers_are_431_in_openai_style(gateway, headers: dict[str, str]) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{lines}content-length: 0\r\n\r\n".encode())
        raw = client.recv(65536)
    assert raw.startswith(b"HTTP/1.1 431 ")
    assert error_code(raw) == "refused_by_gateway"
    assert chat_requests(gateway) == 0


def test_a_body_that_trickles_in_is_408_when_its_time_is_over(start_gateway) -> None:
    gateway = start_gateway(envoy={"upload_timeout_seconds": 1.0})
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n".encode()
        )
        client.settimeout(0.2)
        raw = b""
        gives_up = time.monotonic() + 30
        while b"}" not in raw and time.monotonic() < gives_up:
            try:
                client.sendall(b" ")
                raw += client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
    assert raw.startswith(b"HTTP/1.1 408 ")
    assert error_code(raw) == "refused_by_gateway"
    gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics(), "its place is free again")


def test_json_nested_deeper_than_the_parser_goes_is_400(gateway) -> None:
    deep = b'{"model":"sim","messages":[{"role":"user","content":"hi"}],"x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    answer = gateway.post(PATH, deep)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
    assert gateway.chat("c", HI).status == 200


def test_our_part_takes_no_longer_than_its_deadline(start_gateway) -> None:
    gateway = start_gateway(extproc_env={"KVLOOP_PREPARATION_TIMEOUT_SECONDS": "1"})
    stall(gateway, gateway.fleet.prefill, leg="prefill")
    answer = gateway.chat("c", HI)
    assert (answer.status, answer.outcome, answer.reason) == (200, "decode_only", "prefill_timeout")
    assert answer.text == gateway.right_text(HI)
