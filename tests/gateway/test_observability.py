"""What deploy/observability promises, held against a real gateway's metrics in a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import subprocess
from typing import Any

import pytest
import yaml
from gateway_harness import HOST, Gateway, worker
from prometheus_client.parser import text_string_to_metric_families
from prometheus_server import OBSERVABILITY, Prometheus, tool

from extproc.metrics import TABLE

LONG = "a long enough question to be worth reading back " * 20


def alerts() -> list[dict[str, Any]]:
    """The alert rules as they stand in the file."""
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panel_queries() -> list[tuple[str, str]]:
    """Title and PromQL of every query of the dashboard, as Grafana would send it."""
    found = []
    for panel in json.loads((OBSERVABILITY / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in {"$job": ".*", "$instance": ".*", "$__rate_interval": "1m"}.items():
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


def condition_as_value(promql: str) -> str:
    """Return an alert's condition so that it has a value whether it holds or not."""
    changed, count = re.subn(r"([<>]|==)\s*([0-9.]+)\s*$", r"\1 bool \2", promql.strip())
    assert count == 1, f"a condition ends in a comparison with a number: {promql}"
    return changed


def has_numbers(values: list[float]) -> bool:
    """Whether there is anything to draw."""
    return not all(map(math.isnan, values))


def play(gateway: Gateway) -> int:
    """Play turns of every usual outcome and return how many."""
    answers = []
    for chat in (gateway.new_chat(max_tokens=5), gateway.new_chat(max_tokens=5)):
        answers += [chat.say(LONG), chat.say("and then?"), chat.say("and then?")]
    answers.append(gateway.chat(None, [{"role": "user", "content": "hi"}], n=2, max_tokens=2))
    answers.append(gateway.post("/v1/chat/completions", b"no JSON"))
    assert {answer.outcome for answer in answers[:-1]} == {"cold", "reused", "decode_only"}
    assert answers[-1].status == 400
    return len(answers)


def test_every_query_and_every_alert_is_answered_by_a_real_run(start_gateway, tmp_path) -> None:
    gateway = start_gateway(decode=[worker("decode"), worker("decode")])
    with Prometheus(tmp_path, [f"{HOST}:{admin}" for _, admin in gateway._extproc_ports]) as prometheus:
        gateway.until(lambda: prometheus.query("kvloop_build_info"), "it is scraped before anything happens")
        played = play(gateway)
        gateway.until(lambda: prometheus.query("sum(kvloop_turns_total)") == [played], "all turns have been scraped")
        # The event loop's lag is looked at once a second.
        gateway.until(lambda: prometheus.query("increase(kvloop_event_loop_lag_seconds_count[1m])") > [0])
        # A busy machine may miss a scrape, and then there is nothing until the next.
        for title, query in panel_queries():
            gateway.until(lambda query=query: has_numbers(prometheus.query(query)), f"{title} has data: {query}")
        for rule in alerts():
            value = condition_as_value(rule["expr"])
            gateway.until(lambda value=value: prometheus.query(value), f"{rule['alert']} has data: {value}")
        gateway.until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "every rule has run")
        assert {rule["name"]: rule["health"] for rule in prometheus.rules()} == {
            rule["alert"]: "ok" for rule in alerts()
        }
        assert [rule["name"] for rule in prometheus.rules() if rule["state"] == "firing"] == []
    assert_labels_are_listed(gateway.metrics())


def assert_labels_are_listed(text: str) -> None:
    """The real run's label values are those docs/metrics.md lists."""
    listed = {row.name: row.labels for row in TABLE}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue
        labels = listed.get(family.name) or listed.get(f"{family.name}_total", {})
        for sample in family.samples:
            for label, value in sample.labels.items():
                values = labels.get(label, "")
                assert label == "le" or isinstance(values, str) or value in values, (sample.name, label, value)


@pytest.mark.parametrize(
    "command",
    [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"], ["check", "config", "prometheus.yaml"]],
)
def test_promtool_accepts_the_files(command) -> None:
    run = subprocess.run(  # noqa: S603 - promtool on our own files
        [tool("promtool"), *command], cwd=OBSERVABILITY, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
