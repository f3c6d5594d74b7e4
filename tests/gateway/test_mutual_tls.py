"""TLS on every hop, with certificates made here: Envoy and ext_proc show theirs to each other, and strangers are refused."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h2.connection
import pytest
import trustme
from gateway_harness import HOST, Gateway, worker

from workers.sim.text import WORDS

DOCUMENT = "".join(WORDS[1000:1300])
EXTPROC, WORKER, ENVOY = "extproc.kvloop.test", "worker.kvloop.test", "envoy.kvloop.test"


class Authority:
    """An authority and what it issued, as PEM files."""

    def __init__(self, directory: Path, name: str) -> None:
        self._authority = trustme.CA()
        self._directory = directory / name
        self._directory.mkdir()
        self.file = self._directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str) -> tuple[str, str]:
        """Return the files of a certificate for ``name`` and its key."""
        issued = self._authority.issue_cert(name, HOST)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return str(certificate), str(key)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "strangers")


def extproc_side(ours: Authority) -> dict[str, str]:
    """Settings of ext_proc: mutual TLS for its gRPC server, and towards Envoy's prefill listener."""
    (certificate, key), (client, client_key) = ours.issue(EXTPROC), ours.issue("extproc-as-client")
    return {
        "KVLOOP_TLS_CERTIFICATE_FILE": certificate,
        "KVLOOP_TLS_KEY_FILE": key,
        "KVLOOP_TLS_CLIENT_CA_FILE": str(ours.file),
        "KVLOOP_PREFILL_CA_FILE": str(ours.file),
        "KVLOOP_PREFILL_CERTIFICATE_FILE": client,
        "KVLOOP_PREFILL_KEY_FILE": client_key,
    }


def envoy_side(ours: Authority) -> dict[str, Any]:
    """Settings of Envoy: TLS for clients, mutual TLS on the prefill listener, towards ext_proc and the workers."""
    (certificate, key), (client, client_key) = ours.issue(ENVOY), ours.issue("envoy-as-client")
    return {
        "certificate_file": certificate,
        "key_file": key,
        "prefill_certificate_file": certificate,
        "prefill_key_file": key,
        "prefill_client_ca_file": str(ours.file),
        "extproc_ca_file": str(ours.file),
        "extproc_server_name": EXTPROC,
        "extproc_certificate_file": client,
        "extproc_key_file": client_key,
        "worker_ca_file": str(ours.file),
        "worker_server_name": WORKER,
        "worker_certificate_file": client,
        "worker_key_file": client_key,
    }


def worker_context(ours: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.issue(WORKER))
    context.load_verify_locations(ours.file)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: Authority, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(*own)
    return context


def chat(gateway: Gateway, context: ssl.SSLContext, messages: list[dict[str, Any]]) -> tuple[int, str, str]:
    """Post a chat turn over TLS; return status, receipt and text."""
    connection = http.client.HTTPSConnection(HOST, gateway.port, timeout=30, context=context)
    body = {"model": "sim", "messages": messages, "stream": False}
    headers = {"content-type": "application/json", "x-conversation-id": "c"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    text = answer["choices"][0]["message"]["content"] if response.status == 200 else answer["error"]["code"]
    return response.status, response.headers.get("x-kvloop-receipt", ""), text


def test_a_conversation_is_reused_with_tls_on_every_hop(start_gateway: Callable[..., Gateway], ours: Authority) -> None:
    gateway = start_gateway(
        extproc_env=extproc_side(ours),
        envoy=envoy_side(ours),
        worker_tls=worker_context(ours),
        prefill_scheme="https",
        decode=[worker("decode")],
    )
    messages = [{"role": "user", "content": DOCUMENT}]
    context = client_context(ours)
    status, receipt, text = chat(gateway, context, messages)
    assert (status, text) == (200, gateway.right_text(messages))
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    status, receipt, text = chat(gateway, context, messages)
    assert (status, text) == (200, gateway.right_text(messages))
    assert "outcome=reused" in receipt
    # In plaintext nobody answers, neither to clients nor to legs.
    for port in (gateway.port, gateway.prefill_port, *(each.port for each in gateway.fleet.workers)):
        with pytest.raises((OSError, http.client.HTTPException)):
            plain(port)
    # Without ext_proc's certificate nobody gets to P by the prefill listener.
    with pytest.raises((OSError, http.client.HTTPException)):
        secret(gateway.prefill_port, client_context(ours))


def plain(port: int) -> bytes:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.request("GET", "/health")
    return connection.getresponse().read()


def secret(port: int, context: ssl.SSLContext) -> bytes:
    connection = http.client.HTTPSConnection(HOST, port, timeout=10, context=context)
    connection.request("GET", "/health")
    return connection.getresponse().read()


def grpc_opens(port: int, context: ssl.SSLContext) -> bool:
    """Whether ext_proc's port answers HTTP/2 to this client."""
    import socket  # noqa: PLC0415 - one use

    connection = h2.connection.H2Connection()
    connection.initiate_connection()
    try:
        with (
            socket.create_connection((HOST, port), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=EXTPROC) as client,
        ):
            client.sendall(connection.data_to_send())
            return bool(client.recv(4096))
    except OSError:
        return False


def test_ext_proc_answers_only_who_shows_a_certificate_of_its_authority(
    start_gateway: Callable[..., Gateway], ours: Authority, strangers: Authority
) -> None:
    own = {name: value for name, value in extproc_side(ours).items() if "PREFILL" not in name}
    to_extproc = {name: value for name, value in envoy_side(ours).items() if name.startswith("extproc")}
    gateway = start_gateway(extproc_env=own, envoy=to_extproc)
    port = gateway._extproc_ports[0][0]
    assert gateway.chat("c", [{"role": "user", "content": "hi"}]).status == 200

    def with_alpn(context: ssl.SSLContext) -> ssl.SSLContext:
        context.set_alpn_protocols(["h2"])
        return context

    assert grpc_opens(port, with_alpn(client_context(ours, ours.issue("another"))))
    assert not grpc_opens(port, with_alpn(client_context(ours, strangers.issue("stranger"))))
    assert not grpc_opens(port, with_alpn(client_context(ours)))


@pytest.mark.parametrize("wrong", ["client certificate", "server name", "server authority"])
def test_an_envoy_that_cannot_trust_or_is_not_trusted_serves_nothing_unseen(
    start_gateway: Callable[..., Gateway], ours: Authority, strangers: Authority, wrong: str
) -> None:
    own = {name: value for name, value in extproc_side(ours).items() if "PREFILL" not in name}
    right = {name: value for name, value in envoy_side(ours).items() if name.startswith("extproc")}
    certificate, key = strangers.issue("stranger")
    changes = {
        "client certificate": {"extproc_certificate_file": certificate, "extproc_key_file": key},
        "server name": {"extproc_server_name": "another.kvloop.test"},
        "server authority": {"extproc_ca_file": str(strangers.file)},
    }[wrong]
    gateway = start_gateway(extproc_env=own, envoy={**right, **changes}, waits_for_extproc=False)
    answer = gateway.chat("c", [{"role": "user", "content": "hi"}], kv_transfer_params={"remote_host": "evil"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")
    assert not gateway.received("decode", path="/v1/chat/completions")
