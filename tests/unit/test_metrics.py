"""The metrics are those of the table, with labels from its lists, whatever happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_store import key, turn

from extproc.errors import EnvoyProtocolError
from extproc.events import Call, Leg, LegResult
from extproc.metrics import (
    BODY_BYTES,
    ENGINES_SHOWN,
    PREPARING,
    PROMPT_IDS_DIFFER,
    RELEASES_WAITING,
    RETURN_LEASES,
    STORE_UP,
    TABLE,
    TASKS,
    Metrics,
    as_markdown,
    engine_rows,
)
from extproc.receipt import Outcome, Reason, Receipt
from extproc.store import EngineShare, MemoryStore

PAGE = Path(__file__).parent.parent.parent / "docs/metrics.md"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(max_conversations=1000, max_bytes=10**9)


@pytest.fixture
def metrics(store) -> Metrics:
    return Metrics(store)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample that is not zero, by name and label values."""
    text = generate_latest(metrics.registry).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found if sample.value}


def a_call(leg: Leg) -> Call:
    return Call(leg, "/", (), b"", 1.0)


def a_result(**fields: Any) -> LegResult:
    return LegResult(**{"status": 200, "body": b"", "at": 0.0, "elapsed_seconds": 0.3, **fields})


def test_the_metrics_page_is_current() -> None:
    assert PAGE.read_text() == as_markdown()


def test_names_and_units_follow_the_convention(metrics) -> None:
    for row in TABLE:
        assert re.fullmatch(r"kvloop_[a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind.__name__ == "Counter"), row.name
        assert row.name.endswith("_seconds") == (row.kind.__name__ == "Histogram"), row.name
        assert row.text.endswith("."), row.name
    exposed = {family.name for family in metrics.registry.collect() if not family.name.startswith("process_")}
    expected = {row.name.removesuffix("_total").removesuffix("_info") for row in TABLE}
    ours = (RELEASES_WAITING, RETURN_LEASES, PROMPT_IDS_DIFFER, TASKS, PREPARING, BODY_BYTES, STORE_UP)
    added = {row.name for row in ours}
    assert exposed == expected - added, "the gateway adds these"


def test_a_turn_is_counted_from_its_receipt(metrics) -> None:
    metrics.began()
    metrics.began()
    metrics.finished(
        Receipt(
            outcome=Outcome.REUSED,
            prompt_tokens=202,
            held_tokens=200,
            reused_tokens=199,
            render_ms=4.0,
            prefill_ms=40.0,
            decode_ms=20.0,
            ttft_ms=70.0,
            forbidden_fields_removed=2,
            captured="kept",
        )
    )
    counted = samples(metrics)
    assert counted["kvloop_live_requests",] == 1
    assert counted["kvloop_turns_total", "reused", ""] == 1
    assert counted["kvloop_prompt_tokens_total",] == 202
    assert counted["kvloop_held_tokens_total",] == 200
    assert counted["kvloop_reused_tokens_total",] == 199
    assert counted["kvloop_forbidden_fields_removed_total",] == 2
    assert counted["kvloop_handles_captured_total", "kept"] == 1
    assert counted["kvloop_time_to_first_token_seconds_sum", "reused"] == pytest.approx(0.07)
    parts = {part: counted["kvloop_time_to_first_token_part_seconds_sum", part] for part in ("render", "decode")}
    assert parts == pytest.approx({"render": 0.004, "decode": 0.02})


def test_a_turn_without_a_first_token_is_in_no_histogram_of_it(metrics) -> None:
    metrics.began()
    metrics.finished(Receipt(outcome=Outcome.DECODE_ONLY, reason=Reason.PREFILL_TIMEOUT, prefill_ms=120_000.0))
    counted = samples(metrics)
    assert counted["kvloop_turns_total", "decode_only", "prefill_timeout"] == 1
    assert not [name for name in counted if name[0].startswith("kvloop_time_to_first_token")]


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (a_result(), "2xx"),
        (a_result(status=429), "4xx"),
        (a_result(status=0, error="timeout"), "timeout"),
        (a_result(status=0, error="unreachable"), "unreachable"),
    ],
)
def test_our_calls_are_counted_by_status_class(metrics, result, status) -> None:
    metrics.leg(a_call(Leg.PREFILL), result)
    assert samples(metrics)["kvloop_leg_duration_seconds_sum", "prefill", status] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("error", "label"), [(EnvoyProtocolError("?"), "EnvoyProtocolError"), (KeyError("secret"), "other")]
)
def test_aborted_streams_are_counted_by_a_listed_word(metrics, error, label) -> None:
    metrics.aborted(error)
    assert samples(metrics)["kvloop_streams_aborted_total", label] == 1


def test_an_engine_has_series_while_something_of_it_is_kept(metrics, store) -> None:
    store.put(key(1), turn("engine-a"))
    store.put(key(2), turn("engine-a"))
    store.put(key(3), turn("engine-b", host="10.0.0.2"))
    counted = samples(metrics)
    assert counted["kvloop_engine_kept_turns", "10.0.0.1:5600"] == 2
    assert counted["kvloop_engine_retained_tokens", "10.0.0.1:5600"] == 128
    assert counted["kvloop_engine_retained_tokens", "10.0.0.2:5600"] == 64
    store.take(key(3))
    assert [name for name in samples(metrics) if "10.0.0.2:5600" in name] == []


def test_engines_beyond_the_limit_share_a_series() -> None:
    shares = [EngineShare(f"e{n}", f"host-{n:05}:5600", 1, 100) for n in range(ENGINES_SHOWN + 40)]
    rows = engine_rows(shares)
    assert len(rows) == ENGINES_SHOWN + 1
    assert rows["other"] == (40, 4000)
    assert sum(tokens for _, tokens in rows.values()) == 100 * len(shares)


def test_two_engines_at_one_address_are_one_series() -> None:
    assert engine_rows([EngineShare("old", "h:1", 1, 10), EngineShare("new", "h:1", 2, 20)]) == {"h:1": (3, 30)}


def test_every_label_value_is_one_the_table_lists(metrics) -> None:
    """So that no client, worker or fault can make the number of series grow."""
    for reason in ("", *Reason):
        for outcome in Outcome:
            metrics.began()
            metrics.finished(Receipt(outcome=outcome, reason=Reason(reason) if reason else None, ttft_ms=1.0))
    for status in (100, 204, 302, 404, 503):
        metrics.leg(a_call(Leg.RENDER), a_result(status=status))
    for reason in ("superseded", "draining"):
        metrics.dropped(reason)
    metrics.store_operation("take", 0.0)
    metrics.loop_lag(-0.001)
    assert_labels_are_listed(generate_latest(metrics.registry).decode())


def assert_labels_are_listed(text: str) -> None:
    listed = {row.name.removesuffix("_total").removesuffix("_info"): row.labels for row in TABLE}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue
        labels = listed[family.name.removesuffix("_info")]
        for sample in family.samples:
            for label, value in sample.labels.items():
                values = labels.get(label, "")
                assert label == "le" or isinstance(values, str) or value in values, (sample.name, label, value)
