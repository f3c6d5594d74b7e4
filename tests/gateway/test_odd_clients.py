"""Clients that behave oddly on the wire get an answer, and nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from gateway_harness import worker

from workers.sim.text import WORDS

DOCUMENT = "".join(WORDS[1000:1300])
MEBIBYTE = 1024 * 1024


def head(path: str, body_length: int, *lines: str) -> bytes:
    own = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {body_length}"]
    return "\r\n".join([*own, *lines, "", ""]).encode()


def test_hazard_06_a_handle_that_waited_in_a_slow_clients_stream_is_not_used_after_d_freed_it(start_gateway) -> None:
    """D's clock starts when it finishes, not when a slow client lets the finish chunk through."""
    engine = {"decoder_ttl_seconds": 4.0, "max_model_len": 16384, "block_count": 4096}
    gateway = start_gateway(
        prefill=[worker("prefill", engine={"max_model_len": 16384, "block_count": 4096})],
        decode=[worker("decode", engine=engine)],
        extproc_env={
            "KVLOOP_HANDLE_TTL_SECONDS": "4",
            "KVLOOP_HANDLE_MARGIN_SECONDS": "1",
            "KVLOOP_REUSE_TIMEOUT_SECONDS": "1",
        },
    )
    chat = gateway.new_chat()
    chat.messages.append({"role": "user", "content": DOCUMENT})
    options = {"max_tokens": 3000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps({"model": "sim", "messages": chat.messages, "stream": True, **options}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(
            head("/v1/chat/completions", len(body), f"x-conversation-id: {chat.conversation}", "connection: close")
            + body
        )
        client.recv(4096)
        gateway.until(lambda: gateway.report()["live_pins"], "D has finished and pinned the turn")
        assert "kvloop_kept_turns 0.0" in gateway.metrics(), "the finish chunk is still on its way"
        gateway.until(lambda: not gateway.report()["live_pins"], "D's own deadline passes")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        raw = b""
        while piece := client.recv(1 << 20):
            raw += piece
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in raw.decode("utf8", "ignore").splitlines()
        if line.startswith("data: {") and line.endswith("}")
    )
    chat.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    answer = chat.again()
    assert gateway.report()["handles_used_late"] == 0
    assert answer.reason in {"nothing_kept", "expired"}, "a handle D has freed long ago was attached"


def test_a_slow_upload_is_given_up_with_envoys_own_error(start_gateway) -> None:
    gateway = start_gateway(envoy={"stream_idle_timeout_seconds": 2.0})
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(head("/v1/chat/completions", 1000) + b'{"model"')
        raw = b""
        while b"}}" not in raw and (piece := client.recv(65536)):
            raw += piece
    assert raw.split(b" ", 2)[1] in {b"408", b"504"}
    assert b'"error"' in raw
    time.sleep(0.3)
    assert "stream_aborted" not in gateway.logs()


def test_pipelined_requests_are_answered_in_order(start_gateway) -> None:
    gateway = start_gateway()
    one = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(
            (head("/v1/chat/completions", len(one)) + one) * 3
            + head("/v1/chat/completions", len(one), "connection: close")
            + one
        )
        raw = b""
        while piece := client.recv(65536):
            raw += piece
    assert raw.count(b"HTTP/1.1 200") == 4


def test_a_half_closed_client_is_answered(start_gateway) -> None:
    gateway = start_gateway()
    one = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(head("/v1/chat/completions", len(one), "connection: close") + one)
        client.shutdown(socket.SHUT_WR)
        raw = b""
        while piece := client.recv(65536):
            raw += piece
    gateway.until(lambda: "kvloop_live_requests 0.0" in gateway.metrics())


@pytest.mark.parametrize(
    "line",
    [
        "x-foo: caf\xe9",
        'cookie: a=b; c="d"',
        "x-foo: ",
        "authorization: Bearer \xff",
        "x-conversation-id: \xe9",
        "te: trailers",
        "connection: x-kvloop-secret",
        "content-encoding: gzip",
        "content-type: text/plain",
        "content-encoding: identity, gzip",
    ],
)
def test_odd_headers_get_an_answer(gateway, line: str) -> None:
    one = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(
            head("/v1/chat/completions", len(one)).replace(
                b"\r\n\r\n", b"\r\n" + line.encode("latin1") + b"\r\nconnection: close\r\n\r\n"
            )
            + one
        )
        raw = b""
        while piece := client.recv(65536):
            raw += piece
    status = raw.split(b" ", 2)[1]
    assert status in {b"200", b"400", b"415"}


def test_hazard_31_a_chunked_upload_with_trailers_is_answered(gateway) -> None:
    one = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n"
        )
        for i in range(len(one)):
            client.sendall(b"1\r\n" + one[i : i + 1] + b"\r\n")
        client.sendall(b"0\r\nx-t: 1\r\n\r\n")
        raw = b""
        while piece := client.recv(65536):
            raw += piece
    assert raw.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "member", [b',"vllm_xargs":{"kv_transfer_params":1}', b',"a":1'], ids=["forbidden", "many_members"]
)
def test_one_clients_strange_body_does_not_refuse_the_others(start_gateway, member: bytes) -> None:
    """A body below the size limit must not keep the event loop so long that Envoy takes ext_proc for dead."""
    gateway = start_gateway()
    size = (4 if b"xargs" in member else 16) * MEBIBYTE
    body = b'{"model":"sim","messages":[{"role":"user","content":"hi"}]' + member * (size // len(member)) + b"}"
    done = threading.Event()
    strange = []

    def attack() -> None:
        try:
            answer = gateway.post("/v1/chat/completions", body)
            strange.append((answer.status, answer.raw[:200]))
        except OSError as error:
            strange.append(error)
        done.set()

    threading.Thread(target=attack, daemon=True).start()
    statuses = []
    end = time.monotonic() + 45
    while not done.is_set() and time.monotonic() < end:
        try:
            statuses.append(gateway.chat("c", [{"role": "user", "content": "hi"}], max_tokens=2).status)
        except OSError as error:
            statuses.append(repr(error))
        time.sleep(0.2)
    assert set(statuses) <= {200}
