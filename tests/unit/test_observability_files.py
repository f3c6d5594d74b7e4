"""The dashboard and the alerts speak of metrics that exist, and every alert leads to its section of the runbook."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.metrics import TABLE

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "deploy/observability"
ALERTS = [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def metrics_in(text: str) -> set[str]:
    """Names of our metrics, without what Prometheus appends to a histogram's."""
    return {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvloop_[a-z_]+\b", text)}


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_dashboard_is_current() -> None:
    made = runpy.run_path(str(FILES / "dashboard.py"))["dashboard"]()
    assert json.loads((FILES / "dashboard.json").read_text()) == made


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yaml", "alerts_test.yaml"])
def test_every_metric_exists(name) -> None:
    assert metrics_in((FILES / name).read_text()) - {row.name for row in TABLE} == set()


def test_every_metric_is_to_be_seen_somewhere() -> None:
    shown = metrics_in((FILES / "dashboard.json").read_text() + (FILES / "alerts.yaml").read_text())
    missing = {row.name for row in TABLE} - shown - {"kvloop_forbidden_fields_removed_total"}
    assert not missing, f"give {missing} a panel in deploy/observability/dashboard.py, or an alert"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_its_section_in_the_runbook(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in headings(ROOT / page)
    assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    sections = {heading for heading in headings(ROOT / "docs/runbook.md") if heading.startswith("kvloop")}
    assert sections == {rule["alert"].lower() for rule in ALERTS}


def test_every_alert_is_shown_to_fire() -> None:
    """All but one fire together in alerts_test.yaml, and that one by itself."""
    (together,) = re.findall(
        r"exp_samples: \[\{labels: '\{\}', value: (\d+)\}\]", (FILES / "alerts_test.yaml").read_text()
    )
    assert int(together) == len(ALERTS) - 1


def test_the_readme_makes_a_prometheus_rule_of_the_alerts() -> None:
    block = re.search(r"```\n(\{ printf.*?)\| kubectl apply -f -\n```", (FILES / "README.md").read_text(), re.DOTALL)
    assert block
    run = subprocess.run(["sh", "-c", block[1]], cwd=FILES, capture_output=True, text=True, check=True)  # noqa: S603, S607
    resource = yaml.safe_load(run.stdout)
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == yaml.safe_load((FILES / "alerts.yaml").read_text())


def test_grafana_finds_a_place_for_every_panel() -> None:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
