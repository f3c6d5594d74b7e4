"""``kvloop serve --processes N``: several processes behind one port, one /metrics, one life."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import HOST, Gateway, worker
from redis_harness import RedisServer

from workers.sim.text import WORDS
from workers.supervision import inherited_environment

DOCUMENT = "".join(WORDS[1000:1400])
PROCESSES = 3


class ManyProcesses(Gateway):
    """A gateway whose one ext_proc is made of several processes."""

    def _extproc_component(self, replica: int) -> Any:
        component = super()._extproc_component(replica)
        return replace(component, argv=(*component.argv, "--processes", str(PROCESSES)))

    def processes(self) -> list[int]:
        """Process ids of the processes that serve, in order."""
        own = self.extproc[0].pids()
        return [pid for pid in own if b"--control-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def connections(self) -> list[int]:
        """How many TCP connections to ext_proc's port each process holds."""
        port = self._extproc_ports[0][0]
        held = [
            int(line.split()[9])
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if int(line.split()[1].partition(":")[2], 16) == port and line.split()[3] == "01"
        ]
        return [len(_sockets(pid) & set(held)) for pid in self.processes()]

    def admin(self, path: str, method: str = "GET") -> tuple[int, str]:
        with closing(http.client.HTTPConnection(HOST, self._extproc_ports[0][1], timeout=10)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def counted(self, name: str) -> float:
        """The sum of a metric's samples on the one admin port."""
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.admin("/metrics")[1], re.MULTILINE)
        return sum(map(float, values))


def _sockets(pid: int) -> set[int]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)  # noqa: PTH115 - it is no path
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


@pytest.fixture
def many(tmp_path: Path) -> Iterator[ManyProcesses]:
    with RedisServer(tmp_path) as server:
        env = {"KVLOOP_STORE_URL": server.url}
        parts: dict[str, Any] = {"prefill": [worker("prefill")], "decode": [worker("decode")], "extproc_env": env}
        with ManyProcesses(tmp_path, **parts) as gateway:
            gateway.until(lambda: gateway.admin("/healthz") == (200, f"{PROCESSES} of {PROCESSES} processes\n"))
            yield gateway
            assert gateway.report()["wrong_kv_turns"] == 0
            assert gateway.report()["handles_used_twice"] == 0


def test_processes_share_conversations_and_one_port(many: ManyProcesses) -> None:
    chats = [many.new_chat() for _ in range(4)]
    for chat in chats:
        chat.say(DOCUMENT)
    assert [chat.say("And then?").outcome for chat in chats] == ["reused"] * 4
    many.until(lambda: many.counted("kvloop_turns_total") == 8, "all processes' turns are counted together")
    assert many.counted("kvloop_build_info") == 1
    assert many.counted("kvloop_store_up") == 1
    assert many.admin("/readyz")[0] == 200
    state = many.admin("/debug/state")[1]
    assert state.count('"outcome"') == 8


def test_a_process_that_dies_is_started_again_and_its_counts_stay(many: ManyProcesses) -> None:
    chat = many.new_chat()
    chat.say(DOCUMENT)
    many.until(lambda: many.counted("kvloop_turns_total") == 1)
    before = many.processes()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    many.until(lambda: len(set(many.processes()) - set(before)) == PROCESSES, "new processes")
    many.until(lambda: many.admin("/healthz")[0] == 200)
    many.wait_until_routable()
    many.until(lambda: chat.again().outcome in {"reused", "partial", "cold"}, "the gateway serves again")
    assert many.counted("kvloop_turns_total") >= 2, "no jump back"


def test_connections_are_dealt_out_in_turn(many: ManyProcesses) -> None:
    """Envoy's health checks and streams come over few connections; each process gets its share of those there are."""
    opened = [http.client.HTTPConnection(HOST, many._extproc_ports[0][0]) for _ in range(2 * PROCESSES)]
    try:
        for connection in opened:
            connection.connect()
        many.until(lambda: sum(many.connections()) >= len(opened))
        assert max(many.connections()) - min(many.connections()) <= 2
    finally:
        for connection in opened:
            connection.close()


def test_sigterm_ends_all_of_them(many: ManyProcesses) -> None:
    pids = many.processes()
    many.extproc[0].stop()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert many.extproc[0].output().count('"stopped"') == PROCESSES


def test_a_parent_that_is_killed_takes_its_processes_with_it(many: ManyProcesses) -> None:
    pids = many.processes()
    (parent,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
    os.kill(parent, signal.SIGKILL)
    many.until(lambda: not [pid for pid in pids if runs(pid)], "all are gone")


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait long for whoever inherited it to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def serve(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "extproc.cli", "serve", *options]
    environment = {**inherited_environment(), **env}
    return subprocess.run(  # noqa: S603 - our own
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("options", "env", "told"),
    [
        (["--processes", "2"], {}, "set KVLOOP_STORE_URL"),
        (["--processes", "0"], {}, "at least one process"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(options: list[str], env: dict[str, str], told: str) -> None:
    refused = serve(*options, **env)
    assert refused.returncode == 2
    assert told in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_what_a_process_finds_wrong_ends_all(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "right") as server:
        ports = {"KVLOOP_LISTEN": f"{HOST}:0", "KVLOOP_ADMIN_LISTEN": f"{HOST}:0"}
        refused = serve("--processes", "2", KVLOOP_STORE_URL=server.url, **ports)
    assert refused.returncode == 2
    assert "the store refused the login" in refused.stderr
