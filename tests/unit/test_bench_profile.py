"""Profiles and traces: what they say is what is played, and what they cannot mean is refused."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import orjson
import pytest

from bench.load import profile_json, scaled
from bench.profile import Quantity, parse_profile, read_profile, read_trace, shipped_profiles
from extproc.errors import ConfigError

PROFILE = {
    "conversations_per_second": 4,
    "turns": {"constant": 3},
    "gap_seconds": {"constant": 0.5},
    "first_prompt_tokens": {"constant": 100},
    "next_prompt_tokens": {"constant": 10},
    "answer_tokens": {"constant": 7},
}


def parsed(**changes: object):
    return parse_profile(orjson.dumps({**PROFILE, **changes}), "test")


def test_a_profile_says_what_is_sent() -> None:
    conversation = next(parsed().conversations(seed=1))
    assert [(turn.prompt_tokens, turn.answer_tokens, turn.gap_seconds) for turn in conversation.turns] == [
        (100, 7, 0.0),
        (10, 7, 0.5),
        (10, 7, 0.5),
    ]


def test_conversations_arrive_at_the_rate_asked_for() -> None:
    starts = [each.starts_at for each in itertools.islice(parsed().conversations(seed=1), 2000)]
    assert starts == sorted(starts)
    assert 2000 / starts[-1] == pytest.approx(4, rel=0.1)


def test_a_seed_says_everything() -> None:
    profile = read_profile("chat")
    first, again, other = (list(itertools.islice(profile.conversations(seed), 5)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_with_concurrency_conversations_start_when_there_is_room() -> None:
    given = {key: value for key, value in PROFILE.items() if key != "conversations_per_second"} | {"concurrency": 3}
    profile = parse_profile(orjson.dumps(given), "test")
    assert next(profile.conversations(1)).starts_at is None


@pytest.mark.parametrize(
    ("kind", "values", "mean"),
    [
        ("uniform", (2, 4), 3),
        ("exponential", (3,), 3),
        ("geometric", (3,), 3),
        ("geometric", (1,), 1),
        ("constant", (5,), 5),
    ],
)
def test_quantities_have_the_mean_they_name(kind: str, values: tuple[float, ...], mean: float) -> None:
    dice = Random(1)
    assert statistics.mean(Quantity(kind, values).draw(dice) for _ in range(20_000)) == pytest.approx(mean, rel=0.05)


def test_a_lognormal_quantity_has_its_median_and_bound() -> None:
    dice = Random(1)
    drawn = [Quantity("lognormal", (300, 0.6), 500).draw(dice) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(300, rel=0.05)
    assert max(drawn) == 500


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_can_be_read_and_written_again(name: str) -> None:
    written = profile_json(name)
    assert parse_profile(orjson.dumps(written), name).quantities == read_profile(name).quantities


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": {"dice": 6}},
        {"turns": 6},
        {"turns": {"constant": 1, "uniform": [1, 2]}},
        {"concurrency": 3},
        {"colour": "red"},
        {"turns": {"uniform": [1]}},
    ],
)
def test_a_profile_that_means_nothing_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"test|distribution"):
        parsed(**changes)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="agent, chat, long"):
        read_profile("no-such-profile")


def test_scaling_multiplies_arrivals() -> None:
    assert scaled(PROFILE, 2.5)["conversations_per_second"] == 10
    assert scaled({"concurrency": 4}, 2)["concurrency"] == 8
    assert scaled({"concurrency": 1}, 0.1)["concurrency"] == 1


def test_a_trace_is_played_by_its_times() -> None:
    lines = [
        b'{"at_seconds": 2, "conversation": "b", "prompt_tokens": 5, "answer_tokens": 6}',
        b"",
        b'{"at_seconds": 0.5, "conversation": "a", "prompt_tokens": 1, "answer_tokens": 2}',
        b'{"at_seconds": 3, "conversation": "a", "prompt_tokens": 3, "answer_tokens": 4}',
    ]
    first, second = read_trace(lines)
    assert (first.name, first.starts_at, [turn.at_seconds for turn in first.turns]) == ("a", 0.5, [0.5, 3])
    assert (second.name, second.turns[0].answer_tokens) == ("b", 6)


@pytest.mark.parametrize(
    "line", [b"{", b"{}", b'{"at_seconds": "x", "conversation": 1, "prompt_tokens": 1, "answer_tokens": 1}']
)
def test_a_line_that_is_no_turn_is_named(line: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        read_trace([line])
