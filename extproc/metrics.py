"""Prometheus metrics. Labels come from enumerations only, so their number is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from extproc.events import Call, LegResult
    from extproc.receipt import Receipt
    from extproc.store import MemoryStore

_LEG_SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """All counters of one process, in a registry of their own."""

    def __init__(self, store: MemoryStore) -> None:
        self.registry = registry = CollectorRegistry()
        self._turns = Counter(
            "kvloop_turns",
            "Requests by outcome and, where not everything was reused, why.",
            ["outcome", "reason"],
            registry=registry,
        )
        self._captured = Counter("kvloop_captured", "Handles seen in responses, by fate.", ["fate"], registry=registry)
        self._reused = Counter("kvloop_reused_tokens", "Prompt tokens P did not compute.", registry=registry)
        self._prompt = Counter("kvloop_prompt_tokens", "Prompt tokens of turns with a prefill leg.", registry=registry)
        self._forbidden = Counter(
            "kvloop_forbidden_fields_removed", "Transfer parameters clients tried to send.", registry=registry
        )
        self._legs = Histogram(
            "kvloop_leg_seconds",
            "Time of our own calls to prefill workers, by leg and status class.",
            ["leg", "status"],
            registry=registry,
            buckets=_LEG_SECONDS,
        )
        self._releases = Counter(
            "kvloop_releases",
            "Handles D was told to free, by reason and result.",
            ["reason", "result"],
            registry=registry,
        )
        Gauge("kvloop_kept_turns", "Handles kept for a next turn.", registry=registry).set_function(store.__len__)
        Gauge("kvloop_store_bytes", "Memory of kept handles.", registry=registry).set_function(lambda: store.size_bytes)
        self._live = Gauge("kvloop_live_requests", "Requests being served.", registry=registry)

    def began(self) -> None:
        """Count a request in."""
        self._live.inc()

    def finished(self, receipt: Receipt) -> None:
        """Count a request out, by its receipt."""
        self._live.dec()
        self._turns.labels(receipt.outcome, receipt.reason or "").inc()
        self._reused.inc(receipt.reused_tokens or 0)
        self._prompt.inc(receipt.prompt_tokens or 0)
        self._forbidden.inc(receipt.forbidden_fields_removed)
        if receipt.captured is not None:
            self._captured.labels(receipt.captured).inc()

    def leg(self, call: Call, result: LegResult) -> None:
        """Count one of our own calls."""
        status = f"{result.status // 100}xx" if result.status else result.error
        self._legs.labels(call.leg, status).observe(result.elapsed_seconds)

    def released(self, reason: str, result: str) -> None:
        """Count a release: ``result`` is ``freed``, ``failed`` or ``dropped``."""
        self._releases.labels(reason, result).inc()
