"""The real Prometheus, scraping a gateway under test. Debian's package ``prometheus`` has it, and ``promtool``."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml
from gateway_harness import HOST, free_ports

from workers.supervision import Component, inherited_environment, wait_until_ready

ROOT = Path(__file__).parent.parent.parent
OBSERVABILITY = ROOT / "deploy/observability"
START_TIMEOUT_SECONDS = 60.0


class Prometheus:
    """Runs on deploy/observability/prometheus.yaml, only faster, with ``targets`` for the job. A context manager."""

    def __init__(self, directory: Path, targets: list[str]) -> None:
        (port,) = free_ports(1)
        self._url = f"http://{HOST}:{port}"
        config = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVABILITY / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = targets
        path = directory / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config))
        self._component = Component(
            name="Prometheus",
            argv=(
                tool("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                f"--web.listen-address={HOST}:{port}",
            ),
            env=inherited_environment(),
            log=directory / "prometheus.log",
            grace_seconds=5.0,
        )

    def __enter__(self) -> Self:
        self._component.start()
        probe = {"prometheus": (self._component, self._is_ready)}
        wait_until_ready(probe, timeout_seconds=START_TIMEOUT_SECONDS, progress=lambda _: None, poll_seconds=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._component.stop()

    def query(self, promql: str) -> list[float]:
        """Return the values of an instant query, one per series; a wrong query is an ``AssertionError``."""
        answer = self._get("/api/v1/query", query=promql)
        assert answer["status"] == "success", answer
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """Return the alert rules with their state and health."""
        return [rule for group in self._get("/api/v1/rules")["data"]["groups"] for rule in group["rules"]]

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):  # noqa: S310
            return True
        return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)


def tool(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``."""
    found = shutil.which(name)
    assert found, f"{name} is not installed; on Debian: apt-get install --no-install-recommends prometheus"
    return found
