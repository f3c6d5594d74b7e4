"""Real Envoy, two real ext_proc, two simulated workers of each kind: every one a process of its own, to be struck at will."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from bench.site import HOST, envoy_stats, every_upstream_healthy, free_ports, get
from extproc import envoy_binary, envoy_config
from extproc.settings import EnvoySettings
from workers import warden
from workers.sim.engine import EngineSettings
from workers.sim.settings import WorkerSettings
from workers.sim.text import Model
from workers.supervision import Component, inherited_environment, stop_all, wait_until_ready

START_TIMEOUT_SECONDS = 90.0

RENDER_TIMEOUT_SECONDS = 2.0
REUSE_TIMEOUT_SECONDS = 3.0
PREFILL_TIMEOUT_SECONDS = 4.0
STREAM_IDLE_SECONDS = 12.0
DRAIN_SECONDS = 20.0
HANDLE_TTL_SECONDS = 15.0
HANDLE_MARGIN_SECONDS = 9.0
LEASE_SECONDS = 8.0

BLOCKS = 4096
MODEL_NAME = "sim"
DECODE = WorkerSettings(
    role="decode", engine=EngineSettings(block_count=BLOCKS, max_model_len=8192), model=Model(mean_answer_tokens=24)
)
"""What ``right_answer`` needs to know of the decode workers; ``_worker_command`` starts them so."""


class Part:
    """One process: how it is started, struck, and brought back. ``port`` is where others reach it."""

    def __init__(self, component: Component, port: int, admin_port: int = 0) -> None:
        self.component = component
        self.port = port
        self.admin_port = admin_port

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def pid(self) -> int:
        """Process id; the part must be running."""
        return self.component.pids()[0]

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        warden.send(self.component.pids(), signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on (SIGCONT)."""
        warden.send(self.component.pids(), signal.SIGCONT)

    @contextlib.contextmanager
    def limited(self, kind: int, value: int) -> Iterator[None]:
        """Lower one of its resource limits for a while."""
        pid = self.pid
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (value, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it did not survive
                resource.prlimit(pid, kind, before)

    def sockets(self) -> list[tuple[str, int, int]]:
        """Return its TCP sockets as (state, local port, remote port)."""
        inodes = set()
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                target = str(entry.readlink())
                inodes.add(target[8:-1] if target.startswith("socket:[") else "")
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [
            (STATES.get(row[3], row[3]), int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16))
            for row in rows
            if row[9] in inodes
        ]

    def other_descriptors(self) -> int:
        """Count open file descriptors that are no TCP connections."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir())) - len(self.sockets())


STATES = {"01": "ESTABLISHED", "08": "CLOSE_WAIT", "0A": "LISTEN"}


class FaultSite:
    """All parts. A context manager; not to be used from several threads at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ports = free_ports(11)
        self.port, self.prefill_port, envoy_admin = ports[:3]
        self.extproc = [self._extproc(number, *ports[3 + 2 * number : 5 + 2 * number]) for number in range(2)]
        self.prefill = [self._worker("prefill", number, ports[7 + number]) for number in range(2)]
        self.decode = [self._worker("decode", number, ports[9 + number]) for number in range(2)]
        self.access_log = directory / "access.log"
        self.access_log_written = directory / "access-written.log"
        self.envoy = Part(self._component("Envoy", self._envoy_command(envoy_admin), 2.0), self.port, envoy_admin)

    @property
    def workers(self) -> list[Part]:
        return [*self.prefill, *self.decode]

    @property
    def parts(self) -> list[Part]:
        return [*self.workers, *self.extproc, self.envoy]

    def __enter__(self) -> Self:
        self.access_log.symlink_to(self.access_log_written)
        self.access_log_written.touch()
        try:
            for part in self.parts:
                part.component.start()
            self.wait_until_routable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            if part.component.alive():
                part.go_on()
        stop_all([part.component for part in self.parts])

    def bring_back(self, part: Part) -> None:
        """Start a part that is down, and wait until all of the site serves."""
        if not part.component.alive():
            part.component.stop()
            if part is not self.envoy:
                self.until(lambda: not self._is_healthy(part), "Envoy notices that it is gone")
            part.component.start()
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Wait until every part runs and answers Envoy's health checks. It may still keep some aside for past failures."""
        self._wait(self._is_serving)

    def wait_until_routable(self) -> None:
        """Wait until Envoy holds every upstream for healthy, and keeps none aside any more."""
        self._wait(self._is_routable)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        running = {part.name: (part.component, is_ready) for part in self.parts}
        wait_until_ready(running, timeout_seconds=START_TIMEOUT_SECONDS, progress=lambda _: None, poll_seconds=0.05)

    def until(self, fact: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
        """Wait for ``fact()`` to be true and return it; raise ``AssertionError`` if it never is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if found := fact():
                    return found
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:.0f} s: {what}")

    # --- looking in -------------------------------------------------------------------------------------------------

    def metrics(self, replica: Part) -> dict[str, float]:
        """Return an ext_proc's metrics; series with labels are summed up under their name."""
        sums: dict[str, float] = {}
        for line in get(replica.admin_port, "/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def report(self, worker: Part) -> dict[str, Any]:
        """Return what a worker counted since its start."""
        return dict(json.loads(get(worker.port, "/sim/report")[1]))

    def envoy_stats(self, prefix: str) -> dict[str, int]:
        """Return Envoy's counters and gauges whose names start with ``prefix``."""
        return envoy_stats(self.envoy.admin_port, prefix)

    def upstream_of(self, request_id: str) -> str:
        """Return the worker a client's request went to, ``-`` for none; empty while it is not logged."""
        for line in reversed(self.access_log_written.read_text(errors="replace").splitlines()):
            if request_id in line:
                logged = json.loads(line)
                # Our own legs have ids that begin with the client's.
                if (logged["listener"], logged["request_id"]) == ("main", request_id):
                    return str(logged["upstream"] or "-")
        return ""

    def reopen_access_log(self, target: Path) -> None:
        """Let Envoy write its access log elsewhere from now on."""
        self.access_log.unlink()
        self.access_log.symlink_to(target)
        with contextlib.closing(http.client.HTTPConnection(HOST, self.envoy.admin_port, timeout=10)) as connection:
            connection.request("POST", "/reopen_logs")
            connection.getresponse().read()

    def logs(self) -> str:
        """Return the end of what each part wrote."""
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in files)

    def _is_serving(self) -> bool:
        if not all(map(self._answers, self.extproc)):
            return False
        try:
            status, body = get(self.envoy.admin_port, "/clusters?format=json")
        except OSError:
            return False
        hosts = [host for cluster in json.loads(body)["cluster_statuses"] for host in cluster["host_statuses"]]
        return status == http.client.OK and not any(
            host["health_status"].get("failed_active_health_check") for host in hosts
        )

    def _is_routable(self) -> bool:
        return every_upstream_healthy(self.envoy.admin_port) and all(map(self._answers, self.extproc))

    def _answers(self, replica: Part) -> bool:
        try:
            return get(replica.admin_port, "/healthz")[0] == http.client.OK
        except OSError:
            return False

    def _is_healthy(self, part: Part) -> bool:
        status, body = get(self.envoy.admin_port, "/clusters?format=json")
        return status == http.client.OK and envoy_binary.read_upstream_health(body).get(part.port, False)

    # --- starting ---------------------------------------------------------------------------------------------------

    def _component(
        self, name: str, argv: tuple[str, ...], grace_seconds: float, env: dict[str, str] | None = None
    ) -> Component:
        return Component(
            name=name,
            argv=argv,
            env={**inherited_environment(), **(env or {})},
            log=self.directory / f"{name.replace(' ', '-')}.log",
            grace_seconds=grace_seconds,
        )

    def _worker(self, role: str, number: int, port: int) -> Part:
        argv = (
            *(sys.executable, "-m", "extproc.cli", "sim", role, "--port", str(port), "--plugin"),
            *("--blocks", str(BLOCKS), "--max-model-len", "8192", "--mean-answer-tokens", "24"),
            *("--decoder-ttl-seconds", str(HANDLE_TTL_SECONDS), "--lease-seconds", str(LEASE_SECONDS)),
            *("--prefill-tokens-per-second", "6000", "--decode-tokens-per-second", "80"),
            *(("--no-prefix-caching",) if role == "prefill" else ()),
        )
        return Part(self._component(f"{role} {number}", argv, 2.0), port)

    def _extproc(self, number: int, port: int, admin_port: int) -> Part:
        env = {
            "KVLOOP_LISTEN": f"{HOST}:{port}",
            "KVLOOP_ADMIN_LISTEN": f"{HOST}:{admin_port}",
            "KVLOOP_PREFILL_URL": f"http://{HOST}:{self.prefill_port}",
            "KVLOOP_SINGLE_HOST": "true",
            "KVLOOP_RENDER_TIMEOUT_SECONDS": str(RENDER_TIMEOUT_SECONDS),
            "KVLOOP_REUSE_TIMEOUT_SECONDS": str(REUSE_TIMEOUT_SECONDS),
            "KVLOOP_PREFILL_TIMEOUT_SECONDS": str(PREFILL_TIMEOUT_SECONDS),
            "KVLOOP_HANDLE_TTL_SECONDS": str(HANDLE_TTL_SECONDS),
            "KVLOOP_HANDLE_MARGIN_SECONDS": str(HANDLE_MARGIN_SECONDS),
            "KVLOOP_DRAIN_SECONDS": str(DRAIN_SECONDS),
            "KVLOOP_TURN_LOG_LEVEL": "info",
        }
        argv = (sys.executable, "-m", "extproc.cli", "serve")
        return Part(self._component(f"ext_proc {number}", argv, DRAIN_SECONDS + 10, env), port, admin_port)

    def _envoy_command(self, admin_port: int) -> tuple[str, ...]:
        settings = EnvoySettings(
            listen=f"{HOST}:{self.port}",
            prefill_listen=f"{HOST}:{self.prefill_port}",
            admin_listen=f"{HOST}:{admin_port}",
            extproc=tuple(f"{HOST}:{part.port}" for part in self.extproc),
            prefill=tuple(f"{HOST}:{part.port}" for part in self.prefill),
            decode=tuple(f"{HOST}:{part.port}" for part in self.decode),
            access_log=str(self.access_log),
            health_interval_seconds=0.5,
            stream_idle_timeout_seconds=STREAM_IDLE_SECONDS,
        )
        configuration = self.directory / "envoy.yaml"
        configuration.write_text(envoy_config.render(settings))
        return tuple(envoy_binary.envoy_command(configuration, concurrency=1))
