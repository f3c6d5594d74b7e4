"""What is learnt of how long conversations take to come back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.gaps import BOUNDS_SECONDS, INTERVALS, MAX_KINDS, MEMORY, PRIOR_HAZARD, GapStatistics, interval_of

LIFE_SECONDS = 450.0


def play(statistics: GapStatistics, kind: str, *, returns_in: int | None, times: int = 200) -> None:
    """Let conversations of a kind come back in an interval, or wait through all of them in vain."""
    for _ in range(times):
        for interval in range((INTERVALS - 1 if returns_in is None else returns_in) + 1):
            statistics.entered(kind, interval)
        if returns_in is not None:
            statistics.returned(kind, returns_in)


@pytest.mark.parametrize(
    ("seconds", "interval"), [(0.0, 0), (0.99, 0), (1.0, 1), (3.0, 2), (1023.0, 10), (1024.0, 11), (1e9, 11)]
)
def test_intervals_double(seconds: float, interval: int) -> None:
    assert interval_of(seconds) == interval


def test_where_nothing_is_known_about_two_in_three_come_back() -> None:
    chances = GapStatistics().chances("anybody", LIFE_SECONDS)
    assert chances[0] == pytest.approx(1 - (1 - PRIOR_HAZARD) ** (interval_of(LIFE_SECONDS) + 1))
    assert 0.6 < chances[0] < 0.7


def test_those_who_come_back_soon_are_likely_to_and_unlikely_once_they_have_not() -> None:
    statistics = GapStatistics()
    play(statistics, "chat", returns_in=3)
    chances = statistics.chances("chat", LIFE_SECONDS)
    assert chances[0] > 0.9
    assert chances[4] < chances[3]


def test_one_turn_chats_are_told_from_long_ones() -> None:
    statistics = GapStatistics()
    play(statistics, "first", returns_in=None)
    play(statistics, "later", returns_in=2)
    assert statistics.chances("first", LIFE_SECONDS)[0] < 0.3
    assert statistics.chances("later", LIFE_SECONDS)[0] > 0.9


def test_a_kind_never_seen_is_taken_for_the_average() -> None:
    statistics = GapStatistics()
    play(statistics, "first", returns_in=None)
    new, known = statistics.chances("new", LIFE_SECONDS)[0], statistics.chances("first", LIFE_SECONDS)[0]
    assert known <= new < 0.3


def test_those_still_waiting_count_for_what_they_have_waited() -> None:
    waiting = GapStatistics()
    for _ in range(100):
        for interval in range(4):
            waiting.entered("chat", interval)
    assert waiting.chances("chat", LIFE_SECONDS)[0] < GapStatistics().chances("chat", LIFE_SECONDS)[0]
    assert waiting.chances("chat", LIFE_SECONDS)[4] == GapStatistics().chances("chat", LIFE_SECONDS)[4]


def test_what_is_later_than_the_deadline_is_no_chance() -> None:
    chances = GapStatistics().chances("chat", 10.0)
    assert chances[interval_of(10.0)] > 0
    assert chances[interval_of(10.0) + 1 :] == [0.0] * (INTERVALS - interval_of(10.0) - 1)


def test_habits_that_change_are_learnt_anew() -> None:
    statistics = GapStatistics()
    play(statistics, "chat", returns_in=None, times=int(MEMORY))
    play(statistics, "chat", returns_in=0, times=int(MEMORY))
    assert statistics.chances("chat", LIFE_SECONDS)[0] > 0.5


def test_only_so_many_kinds_are_remembered() -> None:
    statistics = GapStatistics()
    play(statistics, "old", returns_in=None)
    unlikely = statistics.chances("old", LIFE_SECONDS)[0]
    for number in range(MAX_KINDS):
        statistics.entered(f"kind-{number}", 0)
        statistics.returned(f"kind-{number}", 0)
    statistics.returned("old", 0)
    assert statistics.chances("old", LIFE_SECONDS)[0] > unlikely


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, INTERVALS - 1)), max_size=40))
def test_chances_are_chances_and_fall_with_a_nearer_deadline(events: list[tuple[str, int | None]]) -> None:
    statistics = GapStatistics()
    for kind, returns_in in events:
        play(statistics, kind, returns_in=returns_in, times=1)
    for kind in "abc":
        tables = [statistics.chances(kind, until) for until in (0.0, *BOUNDS_SECONDS)]
        assert all(0 <= chance <= 1 for table in tables for chance in table)
        assert all(shorter[0] <= longer[0] for shorter, longer in itertools.pairwise(tables))
