"""Somebody else's P/D orchestrator over the workers of a running stack, with kvloop between it and them.

A second Envoy, in the intercept topology, and an ext_proc service of its own: see ``docs/intercept.md``. Used by the demo
and the end-to-end tests::

    with Stack(options) as stack, Intercepted(stack, VLLM_ROUTER, directory) as front:
        requests to front.base_url ...
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from extproc import envoy_binary, envoy_config
from extproc.settings import EnvoySettings
from workers import venvs
from workers.stack import DRAIN_SECONDS, EXTPROC_GRACE_SECONDS, HOST
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
    from pathlib import Path

    from workers.stack import Stack

_BLOCK_SIZE: Final = re.compile(r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', re.MULTILINE)
START_TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """A P/D orchestrator: how it is started, and what kvloop has to know of it.

    ``argv`` is given its port, another free port, and the base URLs under which it finds P and D.
    """

    name: str
    argv: Callable[[int, int, str, str], tuple[str, ...]]
    environment: venvs.Environment | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


def _vllm_router(port: int, metrics_port: int, prefill: str, decode: str) -> tuple[str, ...]:
    return (
        *(venvs.VLLM_ROUTER.program("vllm-router"), "--vllm-pd-disaggregation", "--host", HOST, "--port", str(port)),
        *("--prefill", prefill, "--decode", decode, "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", "--log-level", "warning"),
    )


VLLM_ROUTER: Final = Orchestrator("vllm-router", _vllm_router, venvs.VLLM_ROUTER)
ORCHESTRATORS: Final = {each.name: each for each in (VLLM_ROUTER,)}


class Intercepted:
    """The orchestrator, Envoy and ext_proc as supervised processes; ``directory`` gets their logs."""

    def __init__(
        self,
        stack: Stack,
        orchestrator: Orchestrator,
        directory: Path,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._stack = stack
        self._orchestrator = orchestrator
        self._directory = directory
        self._progress = progress
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.create_server((HOST, 0))) for _ in range(8)]
            ports = [each.getsockname()[1] for each in sockets]
        (self._port, self._spare_port, self._extproc, self._extproc_admin) = ports[:4]
        (self._prefill, self._decode, self._own_legs, self._envoy_admin) = ports[4:]
        self._block_size = ""
        self._parts = {
            "ext_proc": self._component("ext_proc", (sys.executable, "-m", "extproc.cli", "serve")),
            "Envoy": self._component("Envoy", tuple(envoy_binary.envoy_command(self._configuration, concurrency=1))),
            orchestrator.name: self._component(
                orchestrator.name,
                orchestrator.argv(self._port, self._spare_port, self._url(self._prefill), self._url(self._decode)),
            ),
        }

    @property
    def base_url(self) -> str:
        """Where clients connect: the orchestrator."""
        return self._url(self._port)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # First and in order: on its way out it releases, through Envoy, what would else stay pinned on D.
        self._parts["ext_proc"].stop()
        stop_all(list(self._parts.values()))

    def check(self) -> None:
        """Raise ``StackError`` if a part that should run has died."""
        for part in self._parts.values():
            if not part.alive():
                raise part.death()

    def restart_extproc(self, env: Mapping[str, str] | None = None) -> None:
        """Restart ext_proc with ``env`` on top of its usual settings, for this start only."""
        part = self._parts["ext_proc"]
        part.stop()
        self._wait("Envoy", lambda: not self._upstream_health().get(self._extproc, True), tell=False)
        part.env = {**self._environment(), **(env or {})}
        part.start()
        self._wait("Envoy", self._every_upstream_healthy, tell=False)

    def metrics(self) -> str:
        """Return ext_proc's ``/metrics``."""
        return self._stack.request("GET", self._url(self._extproc_admin), "/metrics").text

    # --- starting -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._orchestrator.environment is not None:
            try:
                self._orchestrator.environment.make(lambda text: self._progress(Progress("set-up", text, 0.0)))
            except venvs.PeerAbsentError as error:
                raise StackError(str(error)) from error
        self._block_size = self._decode_block_size()
        self._parts["ext_proc"].env = self._environment()
        self._configuration.write_text(envoy_config.render(self._envoy_settings()))
        self._parts["ext_proc"].start()
        self._parts["Envoy"].start()
        self._wait("Envoy", self._every_upstream_healthy)
        self._parts[self._orchestrator.name].start()
        self._wait(self._orchestrator.name, lambda: self._answers(self.base_url, "/health"))

    def _envoy_settings(self) -> EnvoySettings:
        return EnvoySettings(
            topology="intercept",
            intercept_prefill=(f"{HOST}:{self._prefill}",),
            intercept_decode=(f"{HOST}:{self._decode}",),
            prefill_listen=f"{HOST}:{self._own_legs}",
            admin_listen=f"{HOST}:{self._envoy_admin}",
            extproc=(f"{HOST}:{self._extproc}",),
            prefill=(f"{HOST}:{self._stack.ports.prefill}",),
            decode=(f"{HOST}:{self._stack.ports.decode}",),
            access_log=str(self._directory / "intercept-access.log"),
            health_interval_seconds=1.0,
        )

    def _environment(self) -> dict[str, str]:
        return {
            **inherited_environment(),
            "KVLOOP_LISTEN": f"{HOST}:{self._extproc}",
            "KVLOOP_ADMIN_LISTEN": f"{HOST}:{self._extproc_admin}",
            "KVLOOP_PREFILL_URL": self._url(self._own_legs),
            "KVLOOP_WORKER_SECRET": self._stack.secret,
            "KVLOOP_SINGLE_HOST": "true",  # as for the stack's own gateway
            "KVLOOP_DRAIN_SECONDS": str(DRAIN_SECONDS),
            # Else a stock D's would be learnt after its first answer, which a quick second turn may overtake.
            "KVLOOP_DECODE_BLOCK_SIZE_TOKENS": self._block_size,
            **self._orchestrator.settings,
        }

    def _decode_block_size(self) -> str:
        answer = self._stack.request("GET", self._stack.url("decode"), "/metrics")
        found = _BLOCK_SIZE.search(answer.text)
        if found is None:
            raise StackError(f"the decode worker does not tell its block size at /metrics: {answer.text[:300]}")
        return found[1]

    def _component(self, name: str, argv: tuple[str, ...]) -> Component:
        return Component(
            name=name,
            argv=argv,
            env=inherited_environment(),
            log=self._directory / f"intercept-{name.lower()}.log",
            grace_seconds=EXTPROC_GRACE_SECONDS if name == "ext_proc" else 5.0,
        )

    @property
    def _configuration(self) -> Path:
        return self._directory / "intercept-envoy.yaml"

    @staticmethod
    def _url(port: int) -> str:
        return f"http://{HOST}:{port}"

    # --- readiness ------------------------------------------------------------------------------------------------------

    def _wait(self, name: str, fact: Callable[[], bool], *, tell: bool = True) -> None:
        wait_until_ready(
            {name: (self._parts[name], fact)},
            timeout_seconds=START_TIMEOUT_SECONDS,
            progress=self._progress if tell else lambda _: None,
        )

    def _every_upstream_healthy(self) -> bool:
        health = self._upstream_health()
        return bool(health) and all(health.values())

    def _upstream_health(self) -> dict[int, bool]:
        """Return, by port, whether Envoy holds an upstream for healthy; empty while Envoy does not answer."""
        try:
            answer = self._stack.request("GET", self._url(self._envoy_admin), "/clusters?format=json")
        except (OSError, http.client.HTTPException):
            return {}
        return envoy_binary.read_upstream_health(answer.text) if answer.status == http.client.OK else {}

    def _answers(self, base_url: str, path: str) -> bool:
        try:
            return self._stack.request("GET", base_url, path).status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
