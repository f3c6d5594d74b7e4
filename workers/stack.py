"""A whole kvloop on one machine: real vLLM P and D, ext_proc and Envoy, on free loopback ports.

Used by the demo, the end-to-end tests and the benches. As a context manager it starts everything, waits
until a request can pass, warms up, and leaves no process behind however it ends::

    with Stack(StackOptions(model=directory, run_directory=logs)) as stack:
        requests to stack.base_url ...

P and D are pinned to different cores, because both spin while they wait and would starve each other.
Everything here blocks; nothing here is meant for production.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from extproc import envoy_binary, envoy_config
from extproc.settings import EnvoySettings
from workers.launch import worker_command
from workers.supervision import (
    Component,
    Progress,
    StackError,
    inherited_environment,
    stop_all,
    wait_until_ready,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Role = Literal["prefill", "decode", "extproc", "envoy"]
WorkerRole = Literal["prefill", "decode"]

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "extproc", "envoy")
WORKERS: Final[tuple[WorkerRole, ...]] = ("prefill", "decode")
HOST: Final = "127.0.0.1"
NAMES: Final[Mapping[Role, str]] = {
    "prefill": "prefill worker",
    "decode": "decode worker",
    "extproc": "ext_proc",
    "envoy": "Envoy",
}
WORKER_STATES: Final = (
    (r"non-default args", "reading the model's configuration"),
    (r"Starting to load model|Loading safetensors|loading model", "loading model"),
    (r"Loading weights took|Model loading took", "preparing the KV cache"),
    (r"init engine .* took|# CPU blocks|KV cache size", "starting the API server"),
    (r"Application startup complete", "answering"),
)
"""What vLLM's log says -> how far the start is."""

WORKER_GRACE_SECONDS: Final = 8.0
DRAIN_SECONDS: Final = 5
EXTPROC_GRACE_SECONDS: Final = 20.0
"""Draining and then releasing what is kept both take their time."""

SOCKET_DIRECTORY_CHARACTERS: Final = 50
"""A Unix socket's path has at most 107 characters; ``/kvloop-12345678/`` and vLLM's UUID take 53 of them."""

START_TIMEOUT_SECONDS: Final = 300.0
REQUEST_TIMEOUT_SECONDS: Final = 120.0
PROBE_TIMEOUT_SECONDS: Final = 2.0
ENVOY_TIMEOUT_SECONDS: Final = 60.0
"""For Envoy's health checks to see a change; they run every second and need up to three in a row."""

KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"

WARM_UP_TEXT: Final = "The quick brown fox jumps over the lazy dog, then sits down and thinks about it. " * 20


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start. ``run_directory`` must exist; logs and the Envoy configuration go there.

    ``prefill`` and ``decode`` are keyword arguments for ``workers.launch.worker_command`` (for example
    ``{"ttl_seconds": 20, "digest": False}``); ``extproc_env`` are ``KVLOOP_*`` variables on top of the
    stack's own. ``cores`` are P's and D's; ``None`` takes the last two this process may use.
    """

    model: Path
    run_directory: Path
    served_model_name: str = "kvloop"
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    extproc_env: Mapping[str, str] = field(default_factory=dict)
    envoy: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[int, int] | None = None
    warm_up: bool = True


class Answer(NamedTuple):
    """An HTTP answer, read to its end."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback TCP ports, one per listener."""

    prefill: int
    prefill_side_channel: int
    decode: int
    decode_side_channel: int
    extproc: int
    extproc_admin: int
    envoy: int
    envoy_prefill: int
    envoy_admin: int

    @classmethod
    def free(cls) -> Ports:
        """Ask the system for ports nobody uses, all held at once so that no two are the same."""
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server((HOST, 0))) for _ in cls.__dataclass_fields__]
            return cls(*(each.getsockname()[1] for each in sockets))


def socket_directory(temporary_directory: str) -> str:
    """Return where the workers' sockets go: the directory given, unless their paths would be too long there."""
    return temporary_directory if len(temporary_directory) <= SOCKET_DIRECTORY_CHARACTERS else "/tmp"  # noqa: S108


class Stack:
    """P, D, ext_proc and Envoy as supervised processes. Not thread-safe; one owner starts and stops."""

    def __init__(self, options: StackOptions, progress: Callable[[Progress], None] = lambda _: None) -> None:
        self.options = options
        self.ports = Ports.free()
        self.secret = secrets.token_hex(16)
        # vLLM leaves the sockets of its processes behind, so they get a directory that goes away with the stack.
        self._scratch = tempfile.TemporaryDirectory(
            prefix="kvloop-", dir=socket_directory(tempfile.gettempdir()), ignore_cleanup_errors=True
        )
        self._progress = progress
        self._components = {role: self._component(role) for role in ROLES}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """Where clients connect: Envoy's main listener."""
        return f"http://{HOST}:{self.ports.envoy}"

    def url(self, role: Role) -> str:
        """Return the base URL of a part's own HTTP interface: a worker's API, ext_proc's or Envoy's admin."""
        port = {
            "prefill": self.ports.prefill,
            "decode": self.ports.decode,
            "extproc": self.ports.extproc_admin,
            "envoy": self.ports.envoy_admin,
        }[role]
        return f"http://{HOST}:{port}"

    def log(self, role: Role) -> Path:
        """Return the file the part's output goes to."""
        return self._components[role].log

    def cores(self, role: Role) -> frozenset[int]:
        """Return the cores a part may run on; empty means any."""
        return self._components[role].cores

    # --- starting and stopping ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything at once and return when a request can pass; raises ``StackError`` naming what failed."""
        self._write_envoy_configuration()
        Path(self._scratch.name).mkdir(exist_ok=True)
        for component in self._components.values():
            component.start()
        self._wait_for(*ROLES)
        self.wait_until_routable()
        if self.options.warm_up:
            self.warm_up()

    def stop(self) -> None:
        """Stop everything; harmless when nothing runs."""
        stop_all(list(self._components.values()))
        self._scratch.cleanup()

    def check(self) -> None:
        """Raise ``StackError`` if a part that should run has died."""
        for component in self._components.values():
            if not component.alive():
                raise component.death()

    def kill(self, role: Role) -> None:
        """Kill one part outright, as a crash would."""
        self._components[role].kill()

    def restart_extproc(self, env: Mapping[str, str] | None = None) -> None:
        """Restart ext_proc (in order, so it drains) with ``env`` on top of its usual settings, for this start only."""
        component = self._components["extproc"]
        component.stop()
        self._wait_until_missed("extproc")
        component.env = {**self._extproc_environment(), **(env or {})}
        component.start()
        self._wait_for("extproc")
        self.wait_until_routable()

    def restart_worker(self, role: WorkerRole, **changes: object) -> None:
        """Restart P or D on its old ports; ``changes`` are ``worker_command`` arguments for this start only."""
        component = self._components[role]
        component.stop()
        self._wait_until_missed(role)
        component.argv, component.env = self._worker(role, changes)
        component.start()
        self._wait_for(role)
        self.wait_until_routable()

    def pids(self) -> list[int]:
        """Process ids of everything that runs."""
        return [pid for component in self._components.values() for pid in component.pids()]

    # --- looking in ---------------------------------------------------------------------------------------

    def metrics(self, role: Role) -> dict[str, float]:
        """Return the part's Prometheus samples by name, each summed over its label sets."""
        path = "/stats/prometheus" if role == "envoy" else "/metrics"
        status, body = self._get(self.url(role), path)
        if status != http.client.OK:
            raise StackError(f"{NAMES[role]} answered {status} for {path}")
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    def kv_cache_usage(self, role: WorkerRole) -> float:
        """Return the share of a worker's KV blocks that are in use, 0 to 1."""
        return self.metrics(role)[KV_CACHE_USAGE]

    # --- readiness ----------------------------------------------------------------------------------------

    def wait_until_routable(self) -> None:
        """Wait until Envoy holds every upstream for healthy: its health checks lag behind the workers' own word."""
        probes = {"envoy": (self._components["envoy"], self._every_upstream_healthy)}
        wait_until_ready(probes, timeout_seconds=ENVOY_TIMEOUT_SECONDS, progress=lambda _: None)

    def warm_up(self) -> None:
        """Play a short conversation of two turns, so that handshakes and first uses are not measured later."""
        self._progress(Progress("warm-up", "first requests and NIXL handshakes both ways", 0.0))
        name = f"warm-up-{secrets.token_hex(4)}"
        messages = [{"role": "user", "content": WARM_UP_TEXT}]
        answer = self._warm_up_turn(name, messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        self._warm_up_turn(name, messages)

    def _warm_up_turn(self, name: str, messages: list[dict[str, str]]) -> str:
        body = {
            "model": self.options.served_model_name,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 5,
            "cache_salt": name,
        }
        status, text = self.request(
            "POST", self.base_url, "/v1/chat/completions", body=body, headers={"x-conversation-id": name}
        )
        self.check()
        if status != http.client.OK:
            raise StackError(f"The first request through Envoy was answered with {status}: {text[:500]}")
        return str(json.loads(text)["choices"][0]["message"]["content"] or "")

    def _wait_for(self, *roles: Role) -> None:
        ready: dict[Role, Callable[[], bool]] = {
            "prefill": lambda: self._answers(self.url("prefill"), "/health"),
            "decode": lambda: self._answers(self.url("decode"), "/health"),
            "extproc": self._extproc_serves,
            "envoy": lambda: self._answers(self.url("envoy"), "/ready"),
        }
        wait_until_ready(
            {role: (self._components[role], ready[role]) for role in roles},
            timeout_seconds=START_TIMEOUT_SECONDS,
            progress=self._progress,
        )

    def _extproc_serves(self) -> bool:
        with grpc.insecure_channel(f"{HOST}:{self.ports.extproc}", GRPC_OPTIONS) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_SECONDS
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _every_upstream_healthy(self) -> bool:
        health = self._upstream_health()
        return bool(health) and all(health.values())

    def _wait_until_missed(self, role: Role) -> None:
        """Wait until Envoy knows that a part is gone.

        Started again sooner, it would still pass for healthy, and fall out just when the next request comes.
        """
        port = {"prefill": self.ports.prefill, "decode": self.ports.decode}.get(role, self.ports.extproc)
        probes = {"envoy": (self._components["envoy"], lambda: not self._upstream_health().get(port, True))}
        wait_until_ready(probes, timeout_seconds=ENVOY_TIMEOUT_SECONDS, progress=lambda _: None)

    def _upstream_health(self) -> dict[int, bool]:
        """Return, by port, whether Envoy holds an upstream for healthy; empty while Envoy does not answer."""
        try:
            status, body = self._get(self.url("envoy"), "/clusters?format=json")
        except OSError:
            return {}
        return envoy_binary.read_upstream_health(body) if status == http.client.OK else {}

    def _answers(self, base_url: str, path: str) -> bool:
        try:
            return self._get(base_url, path)[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def _get(self, base_url: str, path: str) -> Answer:
        return self.request("GET", base_url, path, timeout_seconds=PROBE_TIMEOUT_SECONDS)

    @staticmethod
    def request(
        method: str,
        base_url: str,
        path: str,
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Answer:
        """Make one HTTP request to a part of the stack; ``body`` is sent as JSON. Raises ``OSError`` where that fails."""
        connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=timeout_seconds)
        with contextlib.closing(connection):
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, response.read().decode(errors="replace"))

    # --- what runs ----------------------------------------------------------------------------------------

    def _component(self, role: Role) -> Component:
        if role == "prefill" or role == "decode":  # noqa: PLR1714 - mypy narrows the role only this way
            argv, env = self._worker(role, {})
            cores = frozenset({self._worker_cores()[WORKERS.index(role)]})
        elif role == "extproc":
            argv, env = (sys.executable, "-m", "extproc.cli", "serve"), self._extproc_environment()
            cores = frozenset()
        else:
            argv = tuple(envoy_binary.envoy_command(self._envoy_configuration_path(), concurrency=1))
            env, cores = inherited_environment(), frozenset()
        return Component(
            name=NAMES[role],
            grace_seconds=EXTPROC_GRACE_SECONDS if role == "extproc" else WORKER_GRACE_SECONDS,
            argv=argv,
            env=env,
            log=self.options.run_directory / f"{role}.log",
            cores=cores,
            states=WORKER_STATES if role in WORKERS else (),
        )

    def _worker_cores(self) -> tuple[int, int]:
        if self.options.cores is not None:
            return self.options.cores
        usable = sorted(os.sched_getaffinity(0))
        return usable[-2 % len(usable)], usable[-1]

    def _worker(self, role: WorkerRole, changes: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
        arguments: dict[str, Any] = {
            "device": "cpu",
            "host": HOST,
            "port": self.ports.prefill if role == "prefill" else self.ports.decode,
            "side_channel_host": HOST,
            "side_channel_port": (
                self.ports.prefill_side_channel if role == "prefill" else self.ports.decode_side_channel
            ),
            "served_model_name": self.options.served_model_name,
            "secret": self.secret,
            **(self.options.prefill if role == "prefill" else self.options.decode),
            **changes,
        }
        command = worker_command(role, str(self.options.model), **arguments)
        return command.argv, {**inherited_environment(), **command.env, **self._worker_environment()}

    def _worker_environment(self) -> dict[str, str]:
        return {
            "TMPDIR": self._scratch.name,
            # vLLM's helpers would be compiled at their first use, in the middle of a request: for nothing on a CPU, and
            # only where there is a C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
        }

    def _extproc_environment(self) -> dict[str, str]:
        return {
            **inherited_environment(),
            "KVLOOP_LISTEN": f"{HOST}:{self.ports.extproc}",
            "KVLOOP_ADMIN_LISTEN": f"{HOST}:{self.ports.extproc_admin}",
            "KVLOOP_PREFILL_URL": f"http://{HOST}:{self.ports.envoy_prefill}",
            "KVLOOP_WORKER_SECRET": self.secret,
            "KVLOOP_SINGLE_HOST": "true",  # handles of this stack name 127.0.0.1, and rightly so
            "KVLOOP_DRAIN_DELAY_SECONDS": "0",  # a stack that stops has no client to spare
            "KVLOOP_DRAIN_SECONDS": str(DRAIN_SECONDS),
            **self.options.extproc_env,
        }

    def _envoy_configuration_path(self) -> Path:
        return self.options.run_directory / "envoy.yaml"

    def _write_envoy_configuration(self) -> None:
        settings = EnvoySettings(
            listen=f"{HOST}:{self.ports.envoy}",
            prefill_listen=f"{HOST}:{self.ports.envoy_prefill}",
            admin_listen=f"{HOST}:{self.ports.envoy_admin}",
            extproc=(f"{HOST}:{self.ports.extproc}",),
            prefill=(f"{HOST}:{self.ports.prefill}",),
            decode=(f"{HOST}:{self.ports.decode}",),
            access_log=str(self.options.run_directory / "access.log"),
            **{"health_interval_seconds": 1.0, **self.options.envoy},
        )
        self._envoy_configuration_path().write_text(envoy_config.render(settings))


GRPC_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)
