"""Prometheus metrics: one table says what there is, and what each label may hold, so their number is bounded.

Nothing is counted per chunk: a turn is counted once, from its receipt, when it ends. ``docs/metrics.md`` is this table.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from extproc import __version__
from extproc.events import Leg
from extproc.log_sink import SINK
from extproc.receipt import Outcome, Reason, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from extproc.events import Call, LegResult
    from extproc.receipt import Receipt
    from extproc.store import EngineShare, MemoryStore

# Series that only say when another one began: twice the series, for a question start times answer as well.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

ENGINES_SHOWN: Final = 128
OTHER_ENGINES: Final = "other"
_SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_QUICK_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


@dataclass(frozen=True, slots=True)
class Described:
    """One metric. ``labels``: name to the values it may take, or to a sentence where they cannot be listed."""

    name: str
    kind: type[Counter | Gauge | Histogram | Info]
    text: str
    labels: Mapping[str, Iterable[str] | str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


_STORE_OPERATIONS: Final = ("take", "put", "expire")
_UNANSWERED: Final = ("timeout", "unavailable")
_DROP_REASONS: Final = (
    *("superseded", "evicted", "expired", "over_budget", "ended"),
    *("engine_gone", "engine_draining", "draining"),
    *("store_unavailable", "store_refused", "abandoned", "unacknowledged"),
)

TURNS: Final = Described(
    "kvloop_turns_total",
    Counter,
    "Requests that ended, by what became of them and, where not everything was reused, why.",
    {"outcome": tuple(Outcome), "reason": ("", *Reason)},
)
LIVE: Final = Described("kvloop_live_requests", Gauge, "Requests being served now.")
PREPARING: Final = Described("kvloop_preparing_requests", Gauge, "Those of them that D has not got yet.")
BODY_BYTES: Final = Described("kvloop_request_body_bytes", Gauge, "Bodies of the requests being served.")
PROMPT_TOKENS: Final = Described(
    "kvloop_prompt_tokens_total", Counter, "Prompt tokens of the turns that had a prefill leg."
)
HELD_TOKENS: Final = Described(
    "kvloop_held_tokens_total", Counter, "Tokens that previous turns had left on D when the next turn came."
)
REUSED_TOKENS: Final = Described(
    "kvloop_reused_tokens_total", Counter, "Prompt tokens P read from D instead of computing them."
)
TTFT: Final = Described(
    "kvloop_time_to_first_token_seconds",
    Histogram,
    "From a request's headers to the first piece of its streamed answer. Answers kvloop does not watch are not in it.",
    {"outcome": tuple(Outcome)},
    _SECONDS,
)
TTFT_PARTS: Final = Described(
    "kvloop_time_to_first_token_part_seconds",
    Histogram,
    "Where that time went: rendering the prompt, the prefill leg with its retry, D until its first piece.",
    {"part": ("render", "prefill", "decode")},
    _SECONDS,
)
LEGS: Final = Described(
    "kvloop_leg_duration_seconds",
    Histogram,
    "Our own calls to prefill workers, by status class or by what kept them from an HTTP answer.",
    {
        "leg": (Leg.RENDER, Leg.PREFILL, Leg.RETURN),
        "status": ("1xx", "2xx", "3xx", "4xx", "5xx", "timeout", "unreachable", "guard_refused"),
    },
    _SECONDS,
)
CAPTURED: Final = Described(
    "kvloop_handles_captured_total",
    Counter,
    "Handles in D's answers, by fate: `kept` for the next turn, `released` at once, `absent` where D published none, or why"
    " they were refused.",
    {
        "fate": (
            *("kept", "released", "absent", "too_large", "loopback_host", "foreign_host"),
            *("evicted", "store_unavailable", "store_refused", "unacknowledged"),
            *("not_an_object", "not_for_prefill", "push_mode", "incomplete", "empty"),
        )
    },
)
DROPPED: Final = Described(
    "kvloop_handles_dropped_total",
    Counter,
    "Kept handles that no turn will use: displaced by a newer one, evicted for room, too old, their engine gone.",
    {"reason": _DROP_REASONS},
)
RELEASES: Final = Described(
    "kvloop_releases_total",
    Counter,
    "Handles D was told to free: `failed` ones stay pinned until D's TTL; `dropped` ones found the queue full.",
    {
        "reason": "why the handle was not used: one of `kvloop_handles_dropped_total`'s reasons, one of"
        " `kvloop_turns_total`'s, `refused`, `abandoned`, `failed`, `no_sequence` or `prompt_unmarked`",
        "result": ("freed", "failed", "dropped"),
    },
)
RELEASES_WAITING: Final = Described("kvloop_releases_waiting", Gauge, "Releases queued or under way.")
RETURNS: Final = Described(
    "kvloop_returns_total",
    Counter,
    "Kept turns P was to read back right away. `returned` it did; `failed` ones are lost, all others stay on D.",
    {"result": ("returned", "failed", "overtaken", "busy", "leases_full", "queue_full")},
)
RETURN_LEASES: Final = Described(
    "kvloop_return_leased_tokens", Gauge, "Tokens P holds under a lease after early returns, by our own clock."
)
KEPT: Final = Described("kvloop_kept_turns", Gauge, "Handles kept in this process; not those in a shared store.")
STORE_BYTES: Final = Described("kvloop_store_bytes", Gauge, "Memory the kept handles cost this process.")
ENGINE_LABEL: Final = {
    "engine": f"`host:port` of the engine's side channel; beyond {ENGINES_SHOWN} engines the rest is `{OTHER_ENGINES}`."
    " An engine of which nothing is kept has no series"
}
ENGINE_TURNS: Final = Described(
    "kvloop_engine_kept_turns", Gauge, "Handles kept, by the decode engine that holds their KV.", ENGINE_LABEL
)
ENGINE_TOKENS: Final = Described(
    "kvloop_engine_retained_tokens", Gauge, "Tokens whose KV a decode engine pins for kept handles.", ENGINE_LABEL
)
STORE_OPERATIONS: Final = Described(
    "kvloop_store_operation_duration_seconds",
    Histogram,
    "Operations of the store that keeps the handles.",
    {"operation": _STORE_OPERATIONS},
    _QUICK_SECONDS,
)
STORE_UP: Final = Described(
    "kvloop_store_up", Gauge, "1 while the store is asked; 0 while a shared store is away or does not answer in time."
)
STORE_UNANSWERED: Final = Described(
    "kvloop_store_unanswered_total",
    Counter,
    "Operations a shared store did not answer: `timeout`, or `unavailable`, so that it was not even asked.",
    {"operation": ("take", "put"), "why": _UNANSWERED},
)
FORBIDDEN: Final = Described(
    "kvloop_forbidden_fields_removed_total", Counter, "Transfer parameters clients tried to send."
)
ABORTED: Final = Described(
    "kvloop_streams_aborted_total",
    Counter,
    "ext_proc streams that ended in an error, each a broken request for its client.",
    {"error": ("EnvoyProtocolError", "EventTooLarge", "ResponseTooLarge", "other")},
)
ABANDONED: Final = Described(
    "kvloop_abandoned_total",
    Counter,
    "Requests whose client left, by how far they had come.",
    {"stage": tuple(Stage)},
)
PROMPT_IDS_DIFFER: Final = Described(
    "kvloop_prompt_ids_differed",
    Gauge,
    "1 once a P prefilled other tokens than it was told; nothing is reused from then on until a restart.",
)
LOOP_LAG: Final = Described(
    "kvloop_event_loop_lag_seconds",
    Histogram,
    "How late the event loop came to a timer, looked at once a second: what every chunk of every stream waits, too.",
    buckets=_QUICK_SECONDS,
)
LOG_LINES_DROPPED: Final = Described(
    "kvloop_log_lines_dropped_total",
    Counter,
    "Log lines that could not be written: the disk is full, or whoever reads them has stopped. Turns go on without.",
)
TASKS: Final = Described(
    "kvloop_event_loop_tasks",
    Gauge,
    "Tasks of the event loop: some of its own, one per scrape, one per call to P under way. Growth without load is a leak.",
)
BUILD: Final = Described(
    "kvloop_build_info",
    Info,
    "Always 1; tells the version.",
    {"version": "kvloop's version", "python_version": "the interpreter's"},
)

TABLE: Final = (
    *(TURNS, LIVE, PREPARING, BODY_BYTES, PROMPT_TOKENS, HELD_TOKENS, REUSED_TOKENS, TTFT, TTFT_PARTS, LEGS),
    *(CAPTURED, DROPPED, RELEASES, RELEASES_WAITING, RETURNS, RETURN_LEASES, KEPT, STORE_BYTES),
    *(ENGINE_TURNS, ENGINE_TOKENS, STORE_OPERATIONS, STORE_UP, STORE_UNANSWERED),
    *(FORBIDDEN, ABORTED, ABANDONED, PROMPT_IDS_DIFFER, LOOP_LAG, TASKS, LOG_LINES_DROPPED, BUILD),
)


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self, store: MemoryStore) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._turns = self._made(TURNS)
        self._live = self._made(LIVE)
        self._prompt, self._held, self._reused = map(self._made, (PROMPT_TOKENS, HELD_TOKENS, REUSED_TOKENS))
        self._ttft, self._ttft_parts = self._made(TTFT), self._made(TTFT_PARTS)
        self._legs = self._made(LEGS)
        self._captured, self._dropped, self._releases = map(self._made, (CAPTURED, DROPPED, RELEASES))
        self._returns = self._made(RETURNS)
        self._store_operations = self._made(STORE_OPERATIONS)
        self._forbidden, self._aborted, self._abandoned = map(self._made, (FORBIDDEN, ABORTED, ABANDONED))
        self._loop_lag = self._made(LOOP_LAG)
        self._made(BUILD).info({"version": __version__, "python_version": platform.python_version()})
        self._unanswered = self._made(STORE_UNANSWERED)
        self.watch(KEPT, store.__len__)
        self.watch(STORE_BYTES, lambda: store.size_bytes)
        self.registry.register(_Engines(store.engines))
        self.registry.register(_LogLines())
        self._start_at_zero()

    def _made(self, described: Described) -> Any:
        name = described.name.removesuffix("_info") if described.kind is Info else described.name
        if described.kind is Info:
            return Info(name, described.text, registry=self.registry)
        more: dict[str, Any] = {"buckets": described.buckets} if described.buckets else {}
        return described.kind(name, described.text, list(described.labels), registry=self.registry, **more)

    def _start_at_zero(self) -> None:
        """Show what alerts watch before it first happens: the step from nothing to 1 is no increase to Prometheus."""
        cold = (Reason.READ_FAILED, Reason.RENDER_FAILED, Reason.PREFILL_FAILED, Reason.BLOCK_SIZE_UNKNOWN)
        alone = (Reason.PREFILL_FAILED, Reason.PREFILL_TIMEOUT, Reason.PREFILL_UNREACHABLE, Reason.PREFILL_WITHOUT_KV)
        first: list[tuple[Any, Iterable[tuple[str, ...]]]] = [
            (self._turns, [(Outcome.REUSED, ""), (Outcome.REFUSED, Reason.OVERLOADED)]),
            (self._turns, product([Outcome.COLD], cold)),
            (self._turns, product([Outcome.DECODE_ONLY], alone)),
            (self._ttft, product(Outcome)),
            (self._ttft_parts, product(TTFT_PARTS.labels["part"])),
            (self._legs, product(LEGS.labels["leg"], ["2xx"])),
            (self._captured, product(CAPTURED.labels["fate"])),
            (self._dropped, product(_DROP_REASONS)),
            (self._releases, product(_DROP_REASONS, RELEASES.labels["result"])),
            (self._returns, product(RETURNS.labels["result"])),
            (self._store_operations, product(_STORE_OPERATIONS)),
            (self._unanswered, product(*STORE_UNANSWERED.labels.values())),
            (self._aborted, product(ABORTED.labels["error"])),
            (self._abandoned, product(Stage)),
        ]
        for metric, series in first:
            for labels in series:
                metric.labels(*labels)

    def watch(self, described: Described, value: Callable[[], float]) -> None:
        """Show a gauge whose value is asked for when it is scraped."""
        self._made(described).set_function(value)

    def began(self) -> None:
        """Count a request in."""
        self._live.inc()

    def finished(self, receipt: Receipt) -> None:
        """Count a request out, by its receipt."""
        self._live.dec()
        self._turns.labels(receipt.outcome, receipt.reason or "").inc()
        self._held.inc(receipt.held_tokens or 0)
        self._reused.inc(receipt.reused_tokens or 0)
        self._prompt.inc(receipt.prompt_tokens or 0)
        self._forbidden.inc(receipt.forbidden_fields_removed)
        if receipt.abandoned is not None:
            self._abandoned.labels(receipt.abandoned).inc()
        if receipt.captured is not None:
            self._captured.labels(receipt.captured).inc()
        if receipt.ttft_ms is not None:
            self._ttft.labels(receipt.outcome).observe(receipt.ttft_ms / 1000)
            parts = {"render": receipt.render_ms, "prefill": receipt.prefill_ms, "decode": receipt.decode_ms}
            for part, milliseconds in parts.items():
                if milliseconds is not None:
                    self._ttft_parts.labels(part).observe(milliseconds / 1000)

    def leg(self, call: Call, result: LegResult) -> None:
        """Count one of our own calls."""
        status = f"{result.status // 100}xx" if result.status else result.error
        self._legs.labels(call.leg, status).observe(result.elapsed_seconds)

    def dropped(self, reason: str) -> None:
        """Count a kept handle that no turn will use."""
        self._dropped.labels(reason).inc()

    def released(self, reason: str, result: str) -> None:
        """Count a release: ``result`` is ``freed``, ``failed`` or ``dropped``."""
        self._releases.labels(reason, result).inc()

    def returned(self, result: str) -> None:
        """Count what became of an early return."""
        self._returns.labels(result).inc()

    def store_operation(self, operation: str, seconds: float) -> None:
        """Count an operation of the store: ``take``, ``put`` or ``expire``."""
        self._store_operations.labels(operation).observe(seconds)

    def store_unanswered(self, operation: str, why: str) -> None:
        """Count a take or a put a shared store did not answer: ``timeout`` or ``unavailable``."""
        self._unanswered.labels(operation, why).inc()

    def aborted(self, error: Exception) -> None:
        """Count a stream that ended in an error."""
        name = type(error).__name__
        self._aborted.labels(name if name in ABORTED.labels["error"] else "other").inc()

    def loop_lag(self, seconds: float) -> None:
        """Note how late the event loop was."""
        self._loop_lag.observe(max(0.0, seconds))


class _LogLines:
    """Reads the log's own count when it is scraped."""

    def collect(self) -> Iterator[Metric]:
        name = LOG_LINES_DROPPED.name.removesuffix("_total")
        yield CounterMetricFamily(name, LOG_LINES_DROPPED.text, value=SINK.dropped)


class _Engines:
    """Reads the store when it is scraped, so an engine's series ends with the last handle kept of it."""

    def __init__(self, engines: Callable[[], list[EngineShare]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        turns = GaugeMetricFamily(ENGINE_TURNS.name, ENGINE_TURNS.text, labels=list(ENGINE_TURNS.labels))
        tokens = GaugeMetricFamily(ENGINE_TOKENS.name, ENGINE_TOKENS.text, labels=list(ENGINE_TOKENS.labels))
        for label, (kept_turns, kept_tokens) in engine_rows(self._engines()).items():
            turns.add_metric([label], kept_turns)
            tokens.add_metric([label], kept_tokens)
        yield turns
        yield tokens


def engine_rows(engines: list[EngineShare]) -> dict[str, tuple[int, int]]:
    """Return turns and tokens by engine label. Those beyond the limit, in order of address, are summed up."""
    rows: dict[str, tuple[int, int]] = {}
    for engine in sorted(engines, key=lambda engine: engine.address):
        label = engine.address if engine.address in rows or len(rows) < ENGINES_SHOWN else OTHER_ENGINES
        turns, tokens = rows.get(label, (0, 0))
        rows[label] = (turns + engine.turns, tokens + engine.tokens)
    return rows


_MARKDOWN_HEAD: Final = """# Metrics

`GET /metrics` on the admin port (`KVLOOP_ADMIN_LISTEN`), in Prometheus' text format, one set per process. Times are
seconds. Every label takes its values from a list, so the number of series is bounded whatever clients send. Made by
`python -m extproc.metrics > docs/metrics.md`; a test keeps it current.

Besides these there are `process_*` (CPU, memory, file descriptors) as all Prometheus clients expose them.

| metric | type | meaning |
|---|---|---|
"""


def as_markdown() -> str:
    """Return the reference of all metrics, as docs/metrics.md holds it."""
    lines = [f"| `{row.name}` | {row.kind.__name__.lower()} | {row.text} |\n" for row in TABLE]
    labels = [
        f"| `{row.name}` | `{label}` | {_listed(values)} |\n" for row in TABLE for label, values in row.labels.items()
    ]
    return "".join([_MARKDOWN_HEAD, *lines, "\n## Labels\n\n| metric | label | values |\n|---|---|---|\n", *labels])


def _listed(values: Iterable[str] | str) -> str:
    if isinstance(values, str):
        return values
    return ", ".join(f"`{value}`" if value else "empty" for value in values)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - made to be redirected into the docs
