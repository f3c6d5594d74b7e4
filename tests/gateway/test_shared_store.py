"""Several ext_proc processes share kept turns through a real Redis, and live on when it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from gateway_harness import Gateway
from redis_harness import RedisServer

from workers.sim.text import WORDS
from workers.supervision import inherited_environment

DOCUMENT = "".join(WORDS[1000:1400])
OUTCOMES_WITHOUT_STORE = {("cold", "store_unavailable"), ("cold", "nothing_kept"), ("cold", "engine_gone")}


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def shared(start_gateway, redis_server: RedisServer) -> Gateway:
    return start_gateway(replicas=2, extproc_env={"KVLOOP_STORE_URL": redis_server.url})


def turns_by_replica(gateway: Gateway) -> list[int]:
    """Return how many turns each replica has served."""
    counted = []
    for replica in range(2):
        lines = [line for line in gateway.metrics(replica).splitlines() if line.startswith("kvloop_turns_total{")]
        counted.append(int(sum(float(line.rpartition(" ")[2]) for line in lines)))
    return counted


def test_hazard_40_turns_alternate_between_two_replicas_and_all_reuse(shared: Gateway) -> None:
    chat = shared.new_chat()
    chat.say(DOCUMENT)
    served_by = []
    for _ in range(8):
        before = turns_by_replica(shared)
        answer = chat.say("And then?")
        assert answer.outcome == "reused", answer.receipt
        assert answer.text == shared.right_text(chat.messages[:-1])
        shared.until(lambda before=before: sum(turns_by_replica(shared)) == sum(before) + 1, "the turn is counted")
        served_by.append(turns_by_replica(shared)[1] - before[1])
    assert served_by in ([0, 1] * 4, [1, 0] * 4), "Envoy deals requests out in turn"


def test_a_replica_that_stops_leaves_its_conversations_to_the_others(shared: Gateway) -> None:
    chats = [shared.new_chat() for _ in range(4)]
    for chat in chats:
        chat.say(DOCUMENT)
    shared.stop_extproc(0)
    shared.until(lambda: [*shared._upstream_health().values()].count(False) == 1, "Envoy has missed the replica")
    assert [chat.say("And then?").outcome for chat in chats] == ["reused"] * 4
    assert not shared.received("prefill", leg="release"), "nothing was given up"


def test_hazard_07_of_two_turns_at_once_one_carries_the_handle(shared: Gateway) -> None:
    """Both replicas take at the same time; a handle used twice fails the fixture's own check as well."""
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            chat = shared.new_chat()
            chat.say(DOCUMENT)
            chat.messages.append({"role": "user", "content": "And then?"})
            answers = list(pool.map(lambda _, chat=chat: chat.again(), range(4)))
            assert [answer.outcome for answer in answers].count("reused") == 1
            assert {answer.text for answer in answers} == {shared.right_text(chat.messages)}


def test_a_turn_that_displaces_another_replicas_has_its_blocks_released(shared: Gateway) -> None:
    chat = shared.new_chat()
    chat.say(DOCUMENT)
    # Two conversations under one id: the second's first turn is not proven, and each end displaces what was kept.
    other = shared.new_chat()
    other.conversation = chat.conversation
    for _ in range(2):
        other.say("".join(WORDS[1500:1700]))
        chat.say("And then?")
    kept = int(shared.report()["retained_turns"]) if "retained_turns" in shared.report() else None
    shared.until(lambda: len(shared.received("prefill", leg="release")) >= 3, "displaced turns are released")
    assert kept is None or kept <= 1


def test_hazard_13_a_restarted_d_is_noticed_by_all_replicas(shared: Gateway) -> None:
    chats = [shared.new_chat() for _ in range(4)]
    for chat in chats:
        chat.say(DOCUMENT)
    (decode,) = shared.fleet.decode
    shared.crash_worker(decode)
    shared.start_worker(decode)
    shared.new_chat().say(DOCUMENT)  # the new engine is seen once, by one replica
    answers = [chat.say("And then?") for chat in chats]
    assert {(answer.outcome, answer.reason) for answer in answers} == {("cold", "engine_gone")}


def test_nothing_in_the_store_tells_who_talks_about_what(shared: Gateway, redis_server: RedisServer) -> None:
    chat = shared.new_chat()
    chat.say(DOCUMENT, tenant="tenant-secret-token")
    everything = redis_server.everything()
    assert everything.count(b"kvloop:turn:") == 1
    secrets = [chat.conversation, "tenant-secret-token", "Bearer", *DOCUMENT.split()[:20], chat.messages[-1]["content"]]
    assert [secret for secret in secrets if secret.encode() in everything] == []


def test_a_killed_redis_makes_turns_cold_and_a_restarted_one_reuse(shared: Gateway, redis_server: RedisServer) -> None:
    chat = shared.new_chat()
    chat.say(DOCUMENT)
    redis_server.kill()
    answer = chat.say("And then?")
    assert (answer.outcome, answer.reason) == ("cold", "store_unavailable")
    assert answer.text == shared.right_text(chat.messages[:-1])
    redis_server.start()
    shared.until(lambda: all("kvloop_store_up 1.0" in shared.metrics(replica) for replica in range(2)))
    chat.say("And then?")
    assert chat.say("And then?").outcome == "reused"


def test_a_snapshot_does_not_bring_taken_handles_back(start_gateway, tmp_path: Path) -> None:
    """A restarted server loads what it had saved: turns that were taken after that are in it again."""
    with RedisServer(tmp_path, saves=True) as server:
        gateway = start_gateway(extproc_env={"KVLOOP_STORE_URL": server.url})
        chat = gateway.new_chat()
        chat.say(DOCUMENT)
        server.client().save()
        saved = server.client().dbsize()
        chat.messages.append({"role": "user", "content": "And then?"})
        assert chat.again(max_tokens=1).outcome == "reused"
        server.kill()
        server.start()
        assert server.client().dbsize() == saved, "the taken turn is back"
        gateway.until(lambda: "kvloop_store_up 1.0" in gateway.metrics())
        answer = chat.again()
        assert (answer.outcome, answer.reason) == ("cold", "nothing_kept")


def test_a_frozen_redis_hangs_nobody_and_reuse_comes_back(shared: Gateway, redis_server: RedisServer) -> None:
    """Under load: four conversations talk on while the server stands still, then goes on."""
    stop = threading.Event()
    outcomes: list[tuple[float, str | None, str | None]] = []

    def talk() -> None:
        chat = shared.new_chat()
        chat.say(DOCUMENT)
        while not stop.is_set():
            answer = chat.say("And then?", max_tokens=8)
            assert answer.text == shared.right_text(chat.messages[:-1], max_tokens=8)
            outcomes.append((time.monotonic(), answer.outcome, answer.reason))
            if len(chat.messages) > 16:
                chat = shared.new_chat()
                chat.say(DOCUMENT)

    def seen(outcome: str, since: float) -> int:
        return sum(1 for at, what, _ in list(outcomes) if what == outcome and at > since)

    with ThreadPoolExecutor(4) as pool:
        talkers = [pool.submit(talk) for _ in range(4)]
        try:
            shared.until(lambda: seen("reused", 0.0) > 10)
            redis_server.freeze()
            frozen_at = time.monotonic()
            shared.until(lambda: any(why == "store_unavailable" for _, _, why in list(outcomes)), "cold turns")
            cold_at = time.monotonic()
            shared.until(lambda: seen("cold", cold_at) > 20, "turns go on without the store")
            redis_server.thaw()
            shared.until(lambda: seen("reused", time.monotonic() - 1) > 0, "reuse is back")
        finally:
            redis_server.thaw()
            stop.set()
        for talker in talkers:
            talker.result()
    assert frozen_at
    assert {(what, why) for _, what, why in outcomes if what != "reused"} <= OUTCOMES_WITHOUT_STORE


# --- what is told at the start -------------------------------------------------------------------------------------------


def start(**env: str) -> subprocess.CompletedProcess[str]:
    """Start the service, which is expected to refuse."""
    ports = {"KVLOOP_LISTEN": "127.0.0.1:1", "KVLOOP_ADMIN_LISTEN": "127.0.0.1:1"}
    command = [sys.executable, "-m", "extproc.cli", "serve"]
    environment = {**inherited_environment(), **ports, **env}
    return subprocess.run(  # noqa: S603 - our own
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("password", [None, "wrong-hunter2"])
def test_a_wrong_password_is_told_in_one_line_without_it(tmp_path: Path, password: str | None) -> None:
    with RedisServer(tmp_path, "--requirepass", "right-hunter2") as server:
        own = {} if password is None else {"KVLOOP_STORE_PASSWORD": password}
        refused = start(KVLOOP_STORE_URL=server.url, **own)
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvloop: the store refused the login")
    assert refused.stderr.count("\n") == 1
    assert "KVLOOP_STORE_PASSWORD" in refused.stderr
    assert "hunter2" not in refused.stderr + refused.stdout


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:6379", "KVLOOP_STORE_URL: Redis URL must specify"),
        ("redis://:hunter2@127.0.0.1:6379/?colour=red", "colour"),
    ],
)
def test_a_url_that_is_none_is_told_in_one_line(url: str, told: str) -> None:
    refused = start(KVLOOP_STORE_URL=url)
    assert refused.returncode == 2
    assert told in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "hunter2" not in refused.stderr


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with TLS, and its authority's certificate in ``ca.pem``."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    files = {"cert-file": "server.pem", "key-file": "server.pem", "ca-cert-file": "ca.pem"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(tmp_path / file))]
    with RedisServer(tmp_path, "--tls-auth-clients", "no", *options, tls=True) as server:
        yield server


def test_turns_are_shared_over_tls(start_gateway, tls_server: RedisServer, tmp_path: Path) -> None:
    store = {"KVLOOP_STORE_URL": tls_server.url, "KVLOOP_STORE_CA_FILE": str(tmp_path / "ca.pem")}
    gateway = start_gateway(replicas=2, extproc_env=store)
    chat = gateway.new_chat()
    chat.say(DOCUMENT)
    assert [chat.say("And then?").outcome for _ in range(2)] == ["reused"] * 2


def test_a_certificate_nobody_vouches_for_is_told_in_one_line(tls_server: RedisServer) -> None:
    refused = start(KVLOOP_STORE_URL=tls_server.url)
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvloop: the store's certificate is not trusted")
    assert refused.stderr.count("\n") == 1
