"""Start and end of an ext_proc replica: ready when it can serve, drained without a request lost, gone within its time."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from gateway_harness import HOST, Gateway, free_ports, worker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from workers.sim.settings import Timing
from workers.sim.text import WORDS

DOCUMENT = "".join(WORDS[1000:1200])
HI = [{"role": "user", "content": "hi"}]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(gateway: Gateway, replica: int = 0) -> int:
    with grpc.insecure_channel(f"{HOST}:{gateway._extproc_ports[replica][0]}") as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status)


def readyz(gateway: Gateway, replica: int = 0) -> tuple[int, str]:
    return gateway._get(gateway._extproc_ports[replica][1], "/readyz")


def terminate(gateway: Gateway, replica: int = 0) -> int:
    """Send SIGTERM, as Kubernetes would, and return whom."""
    (pid,) = gateway.extproc[replica].pids()
    os.kill(pid, signal.SIGTERM)
    return pid


def test_a_replica_is_ready_only_once_it_reaches_envoy_s_prefill_listener(start_gateway) -> None:
    (port,) = free_ports(1)
    gateway = start_gateway(
        extproc_env={"KVLOOP_PREFILL_URL": f"http://{HOST}:{port}"}, waits_for_extproc=False, decode=[worker("decode")]
    )
    status, why = readyz(gateway)
    assert (status, f"{HOST}:{port} does not answer" in why) == (503, True)
    assert health(gateway) == NOT_SERVING
    assert gateway.chat("c", HI).status == 503
    with socket.create_server((HOST, port)):
        gateway.until(lambda: readyz(gateway) == (200, "ok\n"))
        assert health(gateway) == SERVING
        gateway.wait_until_routable()
        gateway.until(lambda: gateway._upstream_health()[gateway._extproc_ports[0][0]], "Envoy has seen it")
    gateway.until(lambda: readyz(gateway)[0] == 503, "the listener is gone")
    answer = gateway.chat("c", HI)
    assert (answer.status, answer.outcome) == (200, "decode_only"), "and it serves all the same"


def test_sigterm_says_so_finishes_what_runs_releases_what_is_kept_and_ends(start_gateway) -> None:
    slow = worker("decode", timing=Timing(decode_tokens_per_second=40))
    gateway = start_gateway(
        decode=[slow], extproc_env={"KVLOOP_DRAIN_SECONDS": "30", "KVLOOP_DRAIN_DELAY_SECONDS": "4"}
    )
    for at in range(3):
        gateway.chat(f"kept-{at}", [{"role": "user", "content": DOCUMENT}], max_tokens=3)
    assert gateway.report()["live_pins"] == 3
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(gateway.chat("c", HI, max_tokens=200, ignore_eos=True)))
    client.start()
    gateway.until(lambda: "kvloop_live_requests 1.0" in gateway.metrics() and gateway.report()["running"])
    pid = terminate(gateway)
    gateway.until(lambda: readyz(gateway) == (503, "draining\n"))
    assert health(gateway) == NOT_SERVING
    assert gateway._get(gateway._extproc_ports[0][1], "/healthz")[0] == 200, "not ready is not dead"
    client.join()
    assert answers[0].is_done
    gateway.until(lambda: not os.path.exists(f"/proc/{pid}"), "it ended by itself")  # noqa: PTH110 - a process, no file
    assert gateway.report()["live_pins"] == 0


def test_a_request_that_never_ends_does_not_keep_a_replica_beyond_its_time(start_gateway) -> None:
    gateway = start_gateway(extproc_env={"KVLOOP_DRAIN_SECONDS": "1"})
    gateway.fleet.strike(gateway.fleet.decode[0], "stall", path="/v1/chat")
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(gateway.chat("c", HI)))
    client.start()
    gateway.until(lambda: gateway.report()["faults_struck"])
    pid = terminate(gateway)
    gateway.until(lambda: not os.path.exists(f"/proc/{pid}"), "it ended all the same")  # noqa: PTH110 - as above
    client.join()
    assert answers[0].status == 503
    assert answers[0].json["error"]["message"]


# --- two replicas -------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Clients that chat one after the other until told to stop; every request with its start and what came of it."""

    gateway: Gateway
    clients: int = 6
    results: list[tuple[float, float, bool]] = field(default_factory=list)
    """Start, end, whether all was well."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            started = time.monotonic()
            try:
                answer = self.gateway.chat(f"{number}-{turn}", HI, max_tokens=12, ignore_eos=True)
                good = answer.status == 200 and answer.is_done
            except OSError:
                good = False
            self.results.append((started, time.monotonic(), good))

    def failed(self) -> list[tuple[float, float, bool]]:
        return [result for result in self.results if not result[2]]


def test_of_two_replicas_one_drains_and_one_is_killed_and_no_new_request_fails(start_gateway) -> None:
    gateway = start_gateway(
        replicas=2,
        decode=[worker("decode", timing=Timing(decode_tokens_per_second=60))],
        extproc_env={"KVLOOP_DRAIN_SECONDS": "20", "KVLOOP_DRAIN_DELAY_SECONDS": "3"},
    )
    with Traffic(gateway) as traffic:
        gateway.until(lambda: len(traffic.results) > 12)
        pid = terminate(gateway, 0)
        gateway.until(lambda: not os.path.exists(f"/proc/{pid}"), "the drained replica ended")  # noqa: PTH110
        served = len(traffic.results)
        gateway.until(lambda: len(traffic.results) > served + 12)
        assert traffic.failed() == [], "a drained replica loses nothing"
        gateway.extproc[0].stop()
        gateway.start_extproc(0)
        served = len(traffic.results)
        gateway.until(lambda: len(traffic.results) > served + 12)
        gateway.until(lambda: "kvloop_live_requests 0.0" not in gateway.metrics(1), "the other one has work")
        killed_at = time.monotonic()
        gateway.kill_extproc(1)
        gone_at = time.monotonic()
        served = len(traffic.results)
        gateway.until(lambda: len(traffic.results) > served + 30)
    cut = traffic.failed()
    assert [result for result in cut if result[0] > gone_at] == [], "no new request fails"
    assert all(started < gone_at and ended > killed_at for started, ended, _ in cut)
    assert len(cut) <= traffic.clients, "at most what ran on the killed one"
