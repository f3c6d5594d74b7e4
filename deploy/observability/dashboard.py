"""Write the Grafana dashboard: ``python deploy/observability/dashboard.py > deploy/observability/dashboard.json``.

Rows and panels are the table below; Grafana's JSON is mostly repetition. A test keeps the file current, and another runs
every query in it against a real gateway's metrics in a real Prometheus.
"""
# ruff: noqa: INP001, T201 - a script beside what it writes

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
HEIGHT: Final = 8
SELECTED: Final = 'job=~"$job", instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """One panel. ``queries`` are (PromQL, legend); ``{}`` in PromQL stands for the selected jobs and instances."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    kind: str = "timeseries"
    stacked: bool = False


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Return PromQL for a counter's rate, summed over everything but ``by``."""
    selector = f"{labels}, {{}}" if labels else "{}"
    over = f"sum by ({by}) " if by else "sum"
    return f"{over}(rate({metric}{{{selector}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", labels: str = "") -> str:
    """Return PromQL for a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', ', '.join(filter(None, [by, 'le'])), labels)})"


def mean(histogram: str, by: str = "") -> str:
    """Return PromQL for a histogram's mean."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


REUSED: Final = f"{rate('kvloop_reused_tokens_total')} / {rate('kvloop_prompt_tokens_total')}"
USED: Final = f"{rate('kvloop_reused_tokens_total')} / {rate('kvloop_held_tokens_total')}"
TTFT: Final = "kvloop_time_to_first_token_seconds"
LEGS: Final = "kvloop_leg_duration_seconds"

ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "What it is worth": (
        Panel(
            "Prompt tokens reused",
            "Of all prompt tokens, those P read from D.",
            "percentunit",
            ((REUSED, ""),),
            4,
            "stat",
        ),
        Panel(
            "Kept tokens used",
            "Of what was kept for next turns, what they used.",
            "percentunit",
            ((USED, ""),),
            4,
            "stat",
        ),
        Panel("Turns", "Requests that ended.", "reqps", ((rate("kvloop_turns_total"), ""),), 4, "stat"),
        Panel("Being served", "Requests now.", "short", (("sum(kvloop_live_requests{{{}}})", ""),), 4, "stat"),
        Panel(
            "Conversations kept",
            "With a handle for their next turn.",
            "short",
            (("sum(kvloop_kept_turns{{{}}})", ""),),
            4,
            "stat",
        ),
        Panel("Time to first token, median", "Of watched streams.", "s", ((quantile(0.5, TTFT), ""),), 4, "stat"),
    ),
    "Turns": (
        Panel(
            "By outcome",
            "How turns were served.",
            "reqps",
            ((rate("kvloop_turns_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Why not everything was reused",
            "Reasons of turns; nothing_kept is every conversation's first.",
            "reqps",
            ((rate("kvloop_turns_total", "reason", 'reason!=""'), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Prompt tokens",
            "Prompts of turns with a prefill leg, and what of them P did not compute.",
            "short",
            (
                (rate("kvloop_prompt_tokens_total"), "prompt"),
                (rate("kvloop_held_tokens_total"), "kept from the turn before"),
                (rate("kvloop_reused_tokens_total"), "reused"),
            ),
        ),
    ),
    "Time to first token": (
        Panel("Median, by outcome", "What reuse saves.", "s", ((quantile(0.5, TTFT, "outcome"), "{{outcome}}"),)),
        Panel(
            "95th percentile, by outcome", "The slow ones.", "s", ((quantile(0.95, TTFT, "outcome"), "{{outcome}}"),)
        ),
        Panel(
            "Where it goes",
            "Mean of each part, among the turns that have it.",
            "s",
            ((mean("kvloop_time_to_first_token_part_seconds", "part"), "{{part}}"),),
            stacked=True,
        ),
    ),
    "Legs to prefill workers": (
        Panel("Calls", "By leg and status.", "reqps", ((rate(f"{LEGS}_count", "leg, status"), "{{leg}} {{status}}"),)),
        Panel("Duration, 95th percentile", "By leg.", "s", ((quantile(0.95, LEGS, "leg"), "{{leg}}"),)),
        Panel(
            "Turns without prefill",
            "D computed the prompt, because prefill failed.",
            "reqps",
            (
                (
                    rate("kvloop_turns_total", "reason", 'outcome="decode_only", reason=~"prefill_.*|guard_refused"'),
                    "{{reason}}",
                ),
            ),
        ),
    ),
    "KV retained on decode workers": (
        Panel(
            "Tokens pinned, by engine",
            "Of kept handles.",
            "short",
            (("sum by (engine) (kvloop_engine_retained_tokens{{{}}})", "{{engine}}"),),
            stacked=True,
        ),
        Panel(
            "Conversations kept, by engine",
            "One handle each.",
            "short",
            (("sum by (engine) (kvloop_engine_kept_turns{{{}}})", "{{engine}}"),),
            stacked=True,
        ),
        Panel(
            "Handles captured",
            "In D's answers, by fate.",
            "reqps",
            ((rate("kvloop_handles_captured_total", "fate"), "{{fate}}"),),
        ),
        Panel(
            "Handles dropped",
            "Kept, but no turn will use them.",
            "reqps",
            ((rate("kvloop_handles_dropped_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Releases",
            "D was told to free what nobody will read.",
            "reqps",
            ((rate("kvloop_releases_total", "result"), "{{result}}"),),
        ),
        Panel(
            "Releases waiting",
            "Queued or under way.",
            "short",
            (("sum by (instance) (kvloop_releases_waiting{{{}}})", "{{instance}}"),),
        ),
        Panel(
            "Early returns",
            "Turns P was to read back right away.",
            "reqps",
            ((rate("kvloop_returns_total", "result"), "{{result}}"),),
        ),
        Panel(
            "P's leases of early returns",
            "Tokens it holds for nobody, for 30 s.",
            "short",
            (("sum by (instance) (kvloop_return_leased_tokens{{{}}})", "{{instance}}"),),
        ),
    ),
    "The gateway itself": (
        Panel(
            "Event loop lag, 90th percentile",
            "Every chunk waits as long.",
            "s",
            ((quantile(0.9, "kvloop_event_loop_lag_seconds", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Store operations, 99th percentile",
            "Take, put, expire.",
            "s",
            ((quantile(0.99, "kvloop_store_operation_duration_seconds", "operation"), "{{operation}}"),),
        ),
        Panel(
            "Store away",
            "Replicas that do not ask the shared store, and operations it left unanswered.",
            "short",
            (
                ("sum(1 - kvloop_store_up{{{}}})", "replicas"),
                (rate("kvloop_store_unanswered_total", "operation, why"), "{{operation}} {{why}}"),
            ),
        ),
        Panel(
            "Aborted streams",
            "Broken requests.",
            "reqps",
            ((rate("kvloop_streams_aborted_total", "error"), "{{error}}"),),
        ),
        Panel(
            "Waiting for their prefill",
            "Requests D has not got yet; beyond a bound more are refused.",
            "short",
            (("sum by (instance) (kvloop_preparing_requests{{{}}})", "{{instance}}"),),
        ),
        Panel(
            "Clients that left",
            "By how far their request had come.",
            "reqps",
            ((rate("kvloop_abandoned_total", "stage"), "{{stage}}"),),
        ),
        Panel(
            "CPU",
            "Cores; one process uses one at most.",
            "short",
            ((rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident, and what kept handles cost of it.",
            "bytes",
            (
                ("process_resident_memory_bytes{{{}}}", "{{instance}}"),
                ("kvloop_store_bytes{{{}}}", "{{instance}} handles"),
                ("kvloop_request_body_bytes{{{}}}", "{{instance}} request bodies"),
            ),
        ),
        Panel(
            "Tasks and file descriptors",
            "Both come back to where they were when the load ends.",
            "short",
            (
                ("kvloop_event_loop_tasks{{{}}}", "{{instance}} tasks"),
                ("process_open_fds{{{}}}", "{{instance}} descriptors"),
            ),
        ),
        Panel(
            "Log lines dropped",
            "The disk is full, or whoever reads the log has stopped.",
            "reqps",
            ((rate("kvloop_log_lines_dropped_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Versions",
            "Of kvloop.",
            "short",
            (("count by (version) (kvloop_build_info{{{}}})", "{{version}}"),),
            kind="stat",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": _place(0, top, WIDTH, 1), "panels": []})
        top += 1
        left = 0
        for panel in row:
            height = HEIGHT // 2 if row is ROWS["What it is worth"] else HEIGHT
            if left + panel.width > WIDTH:
                left, top = 0, top + height
            panels.append(_panel(panel, _place(left, top, panel.width, height)))
            left += panel.width
        top += height
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "title": "kvloop",
        "uid": "kvloop",
        "description": "KV reuse between vLLM decode and prefill workers. Metrics: docs/metrics.md of kvloop.",
        "tags": ["kvloop", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, **({"custom": custom} if panel.kind == "timeseries" else {})},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": query.replace("{{{}}}", f"{{{SELECTED}}}").replace("{}", SELECTED),
                "legendFormat": legend or panel.title,
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def values_of(label: str, query: str) -> dict[str, Any]:
        return {
            "name": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": label},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        values_of("job", "label_values(kvloop_build_info, job)"),
        values_of("instance", 'label_values(kvloop_build_info{job=~"$job"}, instance)'),
    ]


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
