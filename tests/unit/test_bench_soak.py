"""The soak plays all it promises, finds nothing, and would find it: each guard taken away shows at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.soak import Result, soak
from bench.soak.client import ACTS, text_of
from bench.soak.command import combine, main
from bench.soak.world import MUST_BE_ZERO
from extproc import attaching
from extproc.cli import main as cli
from extproc.handle import attach_whole
from extproc.reuse import Attachment
from extproc.store import MemoryStore

TURNS = 2000


@pytest.fixture(scope="module")
def played() -> Result:
    return soak(TURNS, seed=5)


def test_two_thousand_turns_show_nothing_that_must_not_happen(played: Result) -> None:
    assert played.turns >= TURNS
    assert played.violations == dict.fromkeys(MUST_BE_ZERO, 0)
    assert played.is_clean


def test_everything_it_promises_is_played(played: Result) -> None:
    assert set(played.acts) == set(ACTS)
    # Which of them strike in so few turns differs from run to run: ids are random, and with them some orders.
    kinds = {"restart decode", "restart prefill", "crash gateway", "drain"}
    assert set(played.faults) <= kinds
    assert len(played.faults) >= 2
    assert {"cold", "partial", "reused"} <= set(played.outcomes)
    assert {"history_differs", "nothing_kept"} <= set(played.reasons)
    assert {"handles_expired", "preemptions"} <= set(played.engines)
    assert played.releases["freed"] > 0
    assert played.texts_checked > 0


def test_the_same_seed_plays_the_same_turns() -> None:
    first, second = soak(200, seed=7).as_json(), soak(200, seed=7).as_json()
    timings = {"seconds", "turns_per_second"}
    assert {key: first[key] for key in first.keys() - timings} == {key: second[key] for key in second.keys() - timings}


def test_without_the_proof_turns_attend_to_wrong_kv_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach_blindly(turn: Any, prompt_ids: Any, **_: Any) -> Attachment:
        return Attachment(attach_whole(turn.handle), min(turn.handle.tokens, len(prompt_ids)), is_whole=True)

    monkeypatch.setattr(attaching, "prove", attach_blindly)
    result = soak(300, seed=1)
    assert result.violations["wrong_kv_turns"] > 0
    assert result.violations["texts_wrong"] > 0
    assert not result.is_clean


def test_a_store_that_gives_a_turn_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "take", lambda self, key: self._turns.get(key))
    result = soak(300, seed=1)
    assert result.violations["handles_sent_twice"] > 0
    assert result.violations["handles_used_twice"] > 0


def test_handles_that_reach_the_client_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from extproc import turn  # noqa: PLC0415 - beside what it breaks

    monkeypatch.setattr(turn, "_hidden", lambda *_, **__: ({}, set()))
    assert soak(100, seed=1).violations["secrets_leaked"] > 0


def test_the_command_writes_its_result_and_says_all_is_well(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.json"
    assert cli(["bench", "soak", "--turns", "60", "--seed", "3", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["is_clean"], result["wrong_kv_turns"], result["seed"]) == (True, 0, 3)
    assert result["turns"] >= 60
    assert result["machine"]["cores"] >= 1
    assert "nothing happened that must not" in capsys.readouterr().out


def test_the_command_fails_when_something_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.soak import command  # noqa: PLC0415 - beside what it breaks

    bad = {**soak(20, seed=1).as_json(), "is_clean": False, "wrong_kv_turns": 1}
    monkeypatch.setattr(command, "_play_all", lambda *_: [bad])

    class Args:
        turns, seed, jobs, json = 20, 1, 1, None

    assert main(Args()) == 1  # type: ignore[arg-type]


def test_results_of_several_seeds_add_up() -> None:
    one, two = soak(30, seed=1).as_json(), soak(30, seed=2).as_json()
    both = combine([one, {**two, "is_clean": False, "wrong_kv_turns": 2}], 1.0)
    assert (both["is_clean"], both["wrong_kv_turns"], both["seeds"]) == (False, 2, [1, 2])
    assert both["turns"] == one["turns"] + two["turns"]
    assert both["outcomes"]["cold"] == one["outcomes"]["cold"] + two["outcomes"]["cold"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices":[{"message":{"content":"a"}}]}', "a"),
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n', "a"),
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', None),
        (b'data: {"choi', None),
        (b"", None),
    ],
)
def test_what_an_answer_says(body: bytes, text: str | None) -> None:
    assert text_of(body) == text
