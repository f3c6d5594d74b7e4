"""The picture of ``kvloop top``: rates, shares and merged lists, from what replicas said twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.top_picture import Sample, picture, quantile

TTFT = "kvloop_time_to_first_token_seconds"
PART = "kvloop_time_to_first_token_part_seconds"


def series(*rows: tuple[str, dict[str, str], float]) -> dict[Any, float]:
    return {(name, frozenset(labels.items())): value for name, labels, value in rows}


def said(replica: str = "a:1", at: float = 0.0, *rows: Any, error: str = "", **state: Any) -> Sample:
    empty: dict[str, Any] = {"version": "1", "engines": [], "conversations": [], "turns": []}
    return Sample(replica, at, series(*rows), {} if error else empty | state, error)


def turns(outcome: str, reason: str, count: float) -> tuple[str, dict[str, str], float]:
    return ("kvloop_turns_total", {"outcome": outcome, "reason": reason}, count)


def test_rates_are_growth_over_time_summed_over_replicas() -> None:
    seen = picture(
        [
            (
                said("a:1", 0, turns("reused", "", 10)),
                said("a:1", 2, turns("reused", "", 16), turns("cold", "expired", 2)),
            ),
            (said("b:1", 0, turns("reused", "", 5)), said("b:1", 4, turns("reused", "", 9))),
        ],
        10,
    )
    assert seen["turns_per_second"] == {"reused": 4.0, "cold": 1.0}
    assert seen["reasons_per_second"] == {"expired": 1.0}
    assert [row["turns_per_second"] for row in seen["replicas"]] == [4.0, 1.0]


def test_a_restarted_replica_counts_from_zero() -> None:
    seen = picture([(said("a:1", 0, turns("cold", "", 900)), said("a:1", 3, turns("cold", "", 6)))], 10)
    assert seen["turns_per_second"] == {"cold": 2.0}
    assert seen["replicas"][0]["turns_per_second"] == 0.0


def test_one_look_has_no_rates_yet() -> None:
    only = said("a:1", 5, turns("cold", "", 900))
    seen = picture([(only, only)], 10)
    assert (seen["turns_per_second"], seen["reused_share"]) == ({}, None)


def test_the_share_reused() -> None:
    def tokens(prompt: float, reused: float) -> list[Any]:
        return [("kvloop_prompt_tokens_total", {}, prompt), ("kvloop_reused_tokens_total", {}, reused)]

    seen = picture([(said("a:1", 0, *tokens(100, 0)), said("a:1", 10, *tokens(300, 150)))], 10)
    assert seen["reused_share"] == 0.75
    assert seen["tokens_per_second"] == {"prompt": 20.0, "held": 0.0, "reused": 15.0}


def test_a_replica_that_is_down_says_why_and_counts_for_nothing() -> None:
    up = said("a:1", 1, turns("cold", "", 1))
    seen = picture([(up, up), (said("b:1", error="refused"), said("b:1", error="refused"))], 10)
    assert seen["replicas"][1] == {"replica": "b:1", "up": False, "error": "refused"}
    assert seen["replicas"][0]["up"] is True


def test_a_replicas_own_numbers() -> None:
    before = said("a:1", 0, ("process_cpu_seconds_total", {}, 4.0))
    rows = [
        ("process_cpu_seconds_total", {}, 5.0),
        ("process_resident_memory_bytes", {}, 2.0**26),
        ("kvloop_live_requests", {}, 3.0),
        ("kvloop_kept_turns", {}, 7.0),
        ("kvloop_releases_waiting", {}, 2.0),
        ("kvloop_prompt_ids_differed", {}, 1.0),
    ]
    (row,) = picture([(before, said("a:1", 2, *rows))], 10)["replicas"]
    assert row == {
        "replica": "a:1",
        "up": True,
        "version": "1",
        "turns_per_second": 0.0,
        "live_requests": 3,
        "kept_turns": 7,
        "shared_store": False,
        "releases_waiting": 2,
        "cpu_cores": 0.5,
        "memory_bytes": 2**26,
        "prompt_ids_differed": True,
    }


def test_times_are_those_of_the_turns_between_the_looks() -> None:
    def histogram(count_below_1: float, count: float, total: float) -> list[Any]:
        labels = {"outcome": "cold"}
        return [
            (f"{TTFT}_bucket", {**labels, "le": "1.0"}, count_below_1),
            (f"{TTFT}_bucket", {**labels, "le": "2.0"}, count),
            (f"{TTFT}_bucket", {**labels, "le": "+Inf"}, count),
            (f"{TTFT}_count", labels, count),
            (f"{TTFT}_sum", labels, total),
            (f"{PART}_count", {"part": "render"}, count),
            (f"{PART}_sum", {"part": "render"}, total / 10),
        ]

    seen = picture([(said("a:1", 0, *histogram(100, 100, 10)), said("a:1", 9, *histogram(105, 110, 20)))], 10)
    assert seen["time_to_first_token"] == {
        "cold": {"count": 10, "mean_seconds": 1.0, "median_seconds": 1.0, "p95_seconds": pytest.approx(1.9)}
    }
    assert seen["time_to_first_token_parts"] == {"render": pytest.approx(0.1)}


def test_engines_are_summed_over_replicas_the_largest_first() -> None:
    def engine(address: str, kept: int, tokens: int) -> dict[str, Any]:
        return {"address": address, "kept_turns": kept, "retained_tokens": tokens, "block_size_tokens": None}

    a = said("a:1", 1, engines=[engine("d1:5600", 1, 100), engine("d2:5600", 2, 150)])
    b = said("b:1", 1, engines=[engine("d1:5600", 3, 300)])
    assert picture([(a, a), (b, b)], 10)["engines"] == [
        {"address": "d1:5600", "kept_turns": 4, "retained_tokens": 400},
        {"address": "d2:5600", "kept_turns": 2, "retained_tokens": 150},
    ]


def test_lists_are_merged_by_age_and_cut() -> None:
    a = said("a:1", 1, turns=[{"age_seconds": 1.0}, {"age_seconds": 5.0}], conversations=[{"age_seconds": 2.0}])
    b = said("b:1", 1, turns=[{"age_seconds": 3.0}])
    seen = picture([(a, a), (b, b)], 2)
    assert seen["turns"] == [{"age_seconds": 1.0, "replica": "a:1"}, {"age_seconds": 3.0, "replica": "b:1"}]
    assert seen["conversations"] == [{"age_seconds": 2.0, "replica": "a:1"}]


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, [(1.0, 10.0), (INFINITY, 10.0)], 0.5),
        (0.5, [(1.0, 0.0), (2.0, 4.0), (INFINITY, 4.0)], 1.5),
        (0.9, [(1.0, 1.0), (INFINITY, 10.0)], 1.0),
        (0.5, [(1.0, 0.0), (INFINITY, 0.0)], 1.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(share, buckets, expected) -> None:
    assert quantile(share, buckets) == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.floats(0.01, 0.99))
def test_a_quantile_is_never_beyond_the_largest_bound(growths, share) -> None:
    bounds = [*(float(n + 1) for n in range(len(growths) - 1)), INFINITY]
    counts = [float(sum(growths[: n + 1])) for n in range(len(growths))]
    largest = bounds[-2] if len(bounds) > 1 else 0.0
    assert 0.0 <= quantile(share, list(zip(bounds, counts, strict=True))) <= largest
