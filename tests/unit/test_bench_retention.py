"""The retention bench shows what it is for, and would show what it must not."""

from __future__ import annotations

from typing import Any

import pytest

from bench.retention import LOADS, POLICIES, Play, as_text, goals

CONVERSATIONS = 16
SLOW = LOADS[1]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {policy: Play(policy, SLOW, seed=1, decode_blocks=600).run(CONVERSATIONS) for policy in POLICIES}


def test_no_policy_makes_a_turn_attend_to_wrong_kv(rows: dict[str, dict[str, Any]]) -> None:
    assert {row["wrong_kv_turns"] + row["handles_used_twice"] + row["refused"] for row in rows.values()} == {0}
    assert len({row["turns"] for row in rows.values()}) == 1


def test_without_a_budget_new_work_waits_for_retained_kv_and_with_it_none_does(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["lazy, no budget"]["requests_queued_for_retained_kv"] > 0
    assert rows["lazy, no budget"]["pinned_share"]["max"] > 0.9
    for policy in ("lazy", "eager", "adaptive"):
        assert rows[policy]["requests_queued_for_retained_kv"] == 0
        assert rows[policy]["pinned_share"]["max"] < 0.9


def test_an_early_return_frees_d_and_makes_later_turns_local(rows: dict[str, dict[str, Any]]) -> None:
    eager = rows["eager"]
    assert set(eager["outcomes"]) == {"local"}
    assert eager["pinned_share"]["mean"] < rows["lazy"]["pinned_share"]["mean"] / 10
    assert eager["returns_wasted"] == eager["returns"] - eager["outcomes"]["local"]


def test_goals_are_judged_and_told(rows: dict[str, dict[str, Any]]) -> None:
    judged = goals(list(rows.values()))
    assert all(judged.values())
    worse = [row | {"ttft_ms": {"p50": 1e6, "p99": 1e6}} if row["policy"] == "eager" else row for row in rows.values()]
    assert not all(goals(worse).values())
    shown = as_text({"rows": list(rows.values()), "goals": judged})
    assert "lazy, no budget" in shown
    assert "met: no wrong KV" in shown
