"""Everything a load benchmark runs against: simulated workers, ext_proc, Envoy, each a supervised and pinned process.

One ``Site`` has one fleet of workers, in a process of their own beside the load generator's; what stands in front of
them is started by name and measured alone on its own core.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import yaml

from bench.processes import proxy_and_load_cores
from extproc import envoy_binary, envoy_config
from extproc.settings import EnvoySettings
from workers.supervision import Component, inherited_environment, stop_all, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HOST: Final = "127.0.0.1"
START_TIMEOUT_SECONDS: Final = 60.0
PROBE_TIMEOUT_SECONDS: Final = 5.0
FIRST_WORDS: Final = re.compile(r"^(prefill|decode) http://[^:]+:(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOptions:
    """What the workers are like. Rates in tokens per second; ``None``: as fast as the machine can."""

    prefill_workers: int = 1
    decode_workers: int = 1
    plugin: bool = True
    """Whether decode workers put the digest into their handles; without it kvloop reads token ids off every chunk."""
    vllm_version: str = "0.32.0"
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = 50.0
    prefix_caching: bool = False
    """Off, a prefill worker stands for another or an evicted one: whatever is reused is read from the decode worker."""
    max_model_len: int = 40_000
    blocks: int = 40_000
    sim_options: tuple[str, ...] = ()
    """Further options of ``kvloop sim``."""


class Site:
    """The fleet and whatever was started in front of it. A context manager."""

    def __init__(self, directory: Path, options: SiteOptions) -> None:
        self.directory = directory
        self.options = options
        self.proxy_cores, self.load_cores = proxy_and_load_cores()
        self.prefill: list[int] = []
        """Ports of the prefill workers."""
        self.decode: list[int] = []
        self.fronts: dict[str, Component] = {}
        """What stands in front now, by name: these are the processes whose cost is measured."""
        self._fleet = self.component("workers", self._fleet_command(), cores=self.load_cores)

    def __enter__(self) -> Self:
        self._fleet.start()
        try:
            self._wait({"workers": (self._fleet, self._fleet_told_ports)})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.take_down()
        self._fleet.stop()

    def component(
        self,
        name: str,
        argv: tuple[str, ...],
        *,
        cores: frozenset[int] | None = None,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 3.0,
    ) -> Component:
        """Return a process of the site, on the proxies' core unless told otherwise; not started."""
        return Component(
            name=name,
            argv=argv,
            env={**inherited_environment(), **(env or {})},
            log=self.directory / f"{name}.log",
            cores=self.proxy_cores if cores is None else cores,
            grace_seconds=grace_seconds,
        )

    def put_in_front(self, components: list[Component], is_ready: Callable[[], bool]) -> None:
        """Start these as what is measured, and wait until all together serve."""
        self.fronts = {component.name: component for component in components}
        for component in components:
            component.start()
        self._wait({component.name: (component, is_ready) for component in components})

    def take_down(self) -> None:
        """Stop what stands in front."""
        stop_all(list(self.fronts.values()))
        self.fronts = {}

    @property
    def watched(self) -> dict[str, list[int]]:
        """Process ids by name: of the fronts, and of the workers."""
        return {name: component.pids() for name, component in {**self.fronts, "workers": self._fleet}.items()}

    # --- the workers ------------------------------------------------------------------------------------------------

    def reports(self) -> list[dict[str, Any]]:
        """Return every worker's report, prefill first."""
        return [json.loads(get(port, "/sim/report")[1]) for port in (*self.prefill, *self.decode)]

    def total(self, key: str) -> int:
        """Return the sum of a counter over all workers."""
        return sum(report[key] for report in self.reports())

    def skip(self, seconds: float) -> None:
        """Let the workers' clocks jump ahead."""
        for port in (*self.prefill, *self.decode):
            with contextlib.closing(
                http.client.HTTPConnection(HOST, port, timeout=PROBE_TIMEOUT_SECONDS)
            ) as connection:
                connection.request("POST", "/sim/clock", json.dumps({"skip_seconds": seconds}))
                connection.getresponse().read()

    def _fleet_command(self) -> tuple[str, ...]:
        options = self.options
        rates = {
            "--prefill-tokens-per-second": options.prefill_tokens_per_second,
            "--decode-tokens-per-second": options.decode_tokens_per_second,
        }
        given = [text for name, rate in rates.items() if rate is not None for text in (name, str(rate))]
        return (
            *(sys.executable, "-m", "extproc.cli", "sim", "fleet", "--port", "0"),
            *("--prefill-workers", str(options.prefill_workers), "--decode-workers", str(options.decode_workers)),
            *("--vllm-version", options.vllm_version, "--max-model-len", str(options.max_model_len)),
            *("--blocks", str(options.blocks), *(("--plugin",) if options.plugin else ()), *given),
            *(() if options.prefix_caching else ("--no-prefix-caching",)),
            *options.sim_options,
        )

    def _fleet_told_ports(self) -> bool:
        told = FIRST_WORDS.findall(self._fleet.output())
        self.prefill = [int(port) for role, port in told if role == "prefill"]
        self.decode = [int(port) for role, port in told if role == "decode"]
        return len(told) == self.options.prefill_workers + self.options.decode_workers

    def _wait(self, probes: dict[str, tuple[Component, Callable[[], bool]]]) -> None:
        wait_until_ready(probes, timeout_seconds=START_TIMEOUT_SECONDS, progress=lambda _: None, poll_seconds=0.05)


@dataclass(slots=True)
class Front:
    """What stands in front of the workers: where requests go, and the processes that make it up."""

    port: int
    components: list[Component]
    is_ready: Callable[[], bool]
    admin_port: int = 0
    extproc_admin_port: int = 0


def kvloop(site: Site, env: Mapping[str, str] | None = None) -> Front:
    """Return kvloop: Envoy with ext_proc, with these ``KVLOOP_*`` variables."""
    port, prefill_port, admin, grpc, extproc_admin = free_ports(5)
    settings = _envoy_settings(site, port, prefill_port, admin, grpc)
    configuration = site.directory / "envoy-kvloop.yaml"
    configuration.write_text(envoy_config.render(settings))
    extproc = site.component(
        "ext_proc",
        (sys.executable, "-m", "extproc.cli", "serve"),
        env={
            "KVLOOP_LISTEN": f"{HOST}:{grpc}",
            "KVLOOP_ADMIN_LISTEN": f"{HOST}:{extproc_admin}",
            "KVLOOP_PREFILL_URL": f"http://{HOST}:{prefill_port}",
            "KVLOOP_SINGLE_HOST": "true",
            "KVLOOP_DRAIN_DELAY_SECONDS": "0",
            "KVLOOP_DRAIN_SECONDS": "2",
            "KVLOOP_LOG_LEVEL": "warning",
            **(env or {}),
        },
    )
    envoy = _envoy(site, configuration)
    return Front(port, [extproc, envoy], lambda: every_upstream_healthy(admin), admin, extproc_admin)


def envoy_alone(site: Site) -> Front:
    """Return the same Envoy with the same configuration, less the ext_proc filter: requests go to D as they are."""
    port, prefill_port, admin, grpc = free_ports(4)
    settings = _envoy_settings(site, port, prefill_port, admin, grpc)
    configuration = site.directory / "envoy-alone.yaml"
    configuration.write_text(yaml.safe_dump(without_ext_proc(yaml.safe_load(envoy_config.render(settings)))))
    return Front(port, [_envoy(site, configuration)], lambda: every_upstream_healthy(admin), admin)


def without_ext_proc(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """Return an Envoy bootstrap without its ext_proc filter, that filter's route settings, and its cluster."""
    name = envoy_config.EXT_PROC_FILTER

    def cleaned(value: Any) -> Any:
        if isinstance(value, list):
            return [cleaned(item) for item in value if not (isinstance(item, dict) and item.get("name") in unwanted)]
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if key != name}
        return value

    unwanted = {name, envoy_config.EXT_PROC_CLUSTER}
    return dict(cleaned(bootstrap))


def every_upstream_healthy(admin_port: int) -> bool:
    """Say whether Envoy runs and holds every upstream for healthy."""
    try:
        status, body = get(admin_port, "/clusters?format=json")
    except OSError:
        return False
    health = envoy_binary.read_upstream_health(body) if status == http.client.OK else {}
    return bool(health) and all(health.values())


def envoy_stats(admin_port: int, prefix: str) -> dict[str, int]:
    """Return Envoy's counters and gauges whose names start with ``prefix``."""
    lines = get(admin_port, f"/stats?filter=^{prefix}")[1].splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines) if value.isdigit()}


def get(port: int, path: str) -> tuple[int, str]:
    """Make a GET request to a local port."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=PROBE_TIMEOUT_SECONDS)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


def free_ports(count: int) -> list[int]:
    """Return loopback ports nobody uses, all held at once so that no two are the same."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def _envoy(site: Site, configuration: Path) -> Component:
    return site.component("Envoy", tuple(envoy_binary.envoy_command(configuration, concurrency=1)), grace_seconds=1.0)


def _envoy_settings(site: Site, port: int, prefill_port: int, admin: int, grpc: int) -> EnvoySettings:
    return EnvoySettings(
        listen=f"{HOST}:{port}",
        prefill_listen=f"{HOST}:{prefill_port}",
        admin_listen=f"{HOST}:{admin}",
        extproc=(f"{HOST}:{grpc}",),
        prefill=tuple(f"{HOST}:{worker}" for worker in site.prefill),
        decode=tuple(f"{HOST}:{worker}" for worker in site.decode),
        health_interval_seconds=1.0,
        access_log=str(site.directory / "access.log"),
    )
