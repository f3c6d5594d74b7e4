"""What ``kvloop top`` shows, computed: replicas' ``/metrics`` and ``/debug/state``, now and some seconds ago, to one picture.

Pure: samples in, plain values out. Counters of a replica that has restarted meanwhile count from zero again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by metric name and labels."""

_TTFT: Final = "kvloop_time_to_first_token_seconds"
_PART: Final = "kvloop_time_to_first_token_part_seconds"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one replica said at a moment (monotonic seconds); ``error`` tells why it said nothing."""

    replica: str
    at: float
    series: Series
    state: Mapping[str, Any]
    error: str = ""


def picture(pairs: Sequence[tuple[Sample, Sample]], rows: int) -> dict[str, Any]:
    """Return the picture of replicas' samples, each (earlier, now), with ``rows`` conversations and turns at most."""
    up = [(before, now) for before, now in pairs if not now.error]
    grown: Series = defaultdict(float)
    rates: Series = defaultdict(float)
    for before, now in up:
        seconds = now.at - before.at
        for key, value in now.series.items():
            earlier = before.series.get(key, 0.0)
            growth = value - earlier if value >= earlier else value
            grown[key] += growth
            rates[key] += growth / seconds if seconds > 0 else 0.0
    tokens = {kind: _total(rates, f"kvloop_{kind}_tokens_total") for kind in ("prompt", "held", "reused")}
    return {
        "replicas": [_replica(before, now) for before, now in pairs],
        "turns_per_second": _by(rates, "kvloop_turns_total", "outcome"),
        "reasons_per_second": _by(rates, "kvloop_turns_total", "reason"),
        "tokens_per_second": tokens,
        "reused_share": tokens["reused"] / tokens["prompt"] if tokens["prompt"] else None,
        "time_to_first_token": _ttft(grown),
        "time_to_first_token_parts": _means(grown, _PART, "part"),
        "engines": _engines(now.state for _, now in up),
        "conversations": _newest((now for _, now in up), "conversations", rows),
        "turns": _newest((now for _, now in up), "turns", rows),
    }


def _replica(before: Sample, now: Sample) -> dict[str, Any]:
    if now.error:
        return {"replica": now.replica, "up": False, "error": now.error}
    seconds = now.at - before.at

    def gauge(name: str) -> float:
        return now.series.get((name, frozenset()), 0.0)

    def rate(name: str) -> float:
        earlier = sum(value for key, value in before.series.items() if key[0] == name)
        growth = sum(value for key, value in now.series.items() if key[0] == name) - earlier
        return max(0.0, growth) / seconds if seconds > 0 else 0.0

    return {
        "replica": now.replica,
        "up": True,
        "version": now.state.get("version", ""),
        "turns_per_second": rate("kvloop_turns_total"),
        "live_requests": int(gauge("kvloop_live_requests")),
        "kept_turns": int(gauge("kvloop_kept_turns")),
        "shared_store": bool(now.state.get("shared_store")),
        "releases_waiting": int(gauge("kvloop_releases_waiting")),
        "cpu_cores": rate("process_cpu_seconds_total"),
        "memory_bytes": int(gauge("process_resident_memory_bytes")),
        "prompt_ids_differed": bool(gauge("kvloop_prompt_ids_differed")),
    }


def _total(values: Series, name: str) -> float:
    return sum(value for key, value in values.items() if key[0] == name)


def _by(values: Series, name: str, label: str) -> dict[str, float]:
    """Sum a metric's values by one label, the largest first; what is zero or has no such label is left out."""
    found: dict[str, float] = defaultdict(float)
    for (metric, labels), value in values.items():
        if metric == name and value:
            found[dict(labels).get(label, "")] += value
    return {key: value for key, value in sorted(found.items(), key=lambda item: -item[1]) if key}


def _ttft(grown: Series) -> dict[str, dict[str, float]]:
    """Return count, mean, median and 95th percentile of the time to first token, by outcome."""
    counts, means = _by(grown, f"{_TTFT}_count", "outcome"), _means(grown, _TTFT, "outcome")
    found: dict[str, dict[str, float]] = {}
    for outcome, count in counts.items():
        buckets = sorted(
            (float(dict(labels)["le"]), value)
            for (metric, labels), value in grown.items()
            if metric == f"{_TTFT}_bucket" and dict(labels)["outcome"] == outcome
        )
        found[outcome] = {
            "count": count,
            "mean_seconds": means[outcome],
            "median_seconds": quantile(0.5, buckets),
            "p95_seconds": quantile(0.95, buckets),
        }
    return found


def _means(grown: Series, name: str, label: str) -> dict[str, float]:
    sums = _by(grown, f"{name}_sum", label)
    return {key: sums.get(key, 0.0) / count for key, count in _by(grown, f"{name}_count", label).items()}


def quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """Estimate a quantile as Prometheus does: from (upper bound, cumulative count), linear within a bucket."""
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets[:-1]:  # the last one ends nowhere
        if count >= wanted:
            return lower + (upper - lower) * ((wanted - below) / (count - below) if count > below else 1.0)
        lower, below = upper, count
    return lower


def _engines(states: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum what all replicas keep of each engine, the largest first."""
    turns: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    for state in states:
        for engine in state["engines"]:
            turns[engine["address"]] += engine["kept_turns"]
            tokens[engine["address"]] += engine["retained_tokens"]
    return [
        {"address": address, "kept_turns": turns[address], "retained_tokens": count}
        for address, count in sorted(tokens.items(), key=lambda item: -item[1])
    ]


def _newest(samples: Iterable[Sample], kind: str, rows: int) -> list[dict[str, Any]]:
    """Merge the replicas' lists, the youngest first."""
    merged = [{**row, "replica": sample.replica} for sample in samples for row in sample.state[kind]]
    return sorted(merged, key=lambda row: row["age_seconds"])[:rows]
