"""The ledger of what decode engines retain: its sums, its caps, and who goes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.budget import BudgetRules, EngineRetention, Entry, Ledger
from extproc.identity import ConversationKey
from extproc.worker_metrics import EngineLoad

LIFE_SECONDS = 450.0
CAPACITY = 10_000


def key(number: int) -> ConversationKey:
    return ConversationKey(number.to_bytes(16, "big"))


def ledger(share: float = 0.5, max_tokens: int | None = None, pressure: float = 0.8) -> Ledger:
    return Ledger(BudgetRules(share, max_tokens, pressure, read_cost_tokens=64))


def entry(tokens: int = 1000, *, kind: str = "later", since: float = 0.0, engine: str = "d") -> Entry:
    return Entry(engine, tokens, kind, since, since + LIFE_SECONDS)


def load(usage: float = 0.1, waiting: int = 0, capacity: int | None = CAPACITY) -> EngineLoad:
    return EngineLoad(16, capacity, usage, waiting)


def only(held: Ledger) -> EngineRetention:
    (engine,) = held.engines()
    return engine


# --- sums -----------------------------------------------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """``self.model`` is what should be in the ledger: key to entry."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger()
        self.model: dict[ConversationKey, Entry] = {}
        self.now = 0.0

    @rule(number=st.integers(0, 5), tokens=st.integers(1, 3000), engine=st.sampled_from("de"))
    def keep(self, number: int, tokens: int, engine: str) -> None:
        new = entry(tokens, since=self.now, engine=engine)
        self.model[key(number)] = new
        self.ledger.kept(key(number), new)

    @rule(number=st.integers(0, 5))
    def take(self, number: int) -> None:
        self.model.pop(key(number), None)
        self.ledger.taken(key(number), self.now)

    @rule(number=st.integers(0, 5))
    def drop(self, number: int) -> None:
        self.model.pop(key(number), None)
        self.ledger.dropped(key(number))

    @rule(seconds=st.sampled_from([1.0, 100.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.model = {key: kept for key, kept in self.model.items() if kept.deadline > self.now}
        self.ledger.expire(self.now)

    @invariant()
    def sums_are_right(self) -> None:
        for engine in self.ledger.engines():
            mine = [kept.tokens for kept in self.model.values() if kept.engine_id == engine.engine_id]
            assert (engine.turns, engine.tokens) == (len(mine), sum(mine))
        assert {kept.engine_id for kept in self.model.values()} <= {each.engine_id for each in self.ledger.engines()}


class TestLedger(LedgerMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=40, stateful_step_count=25)


# --- caps -----------------------------------------------------------------------------------------------------------


def test_without_a_known_capacity_nothing_is_too_much() -> None:
    held = ledger()
    held.kept(key(1), entry(10**9))
    assert held.excess("d", 0.0) == []
    held.observed("d", load(capacity=None))
    assert (held.excess("d", 0.0), only(held).cap) == ([], None)
    assert held.excess("unheard-of", 0.0) == []


def test_the_cap_is_a_share_of_the_engine_s_capacity() -> None:
    held = ledger(share=0.3)
    held.kept(key(1), entry())
    held.observed("d", load())
    assert only(held) == EngineRetention("d", turns=1, tokens=1000, cap=3000, usage=0.1)


def test_a_set_cap_holds_before_the_engine_was_ever_asked() -> None:
    held = ledger(max_tokens=1500)
    held.kept(key(1), entry())
    assert held.excess("d", 0.0) == []
    held.kept(key(2), entry())
    assert len(held.excess("d", 0.0)) == 1
    held.observed("d", load())
    assert only(held).cap == 1500


def test_each_engine_has_its_own() -> None:
    held = ledger(max_tokens=1500)
    held.kept(key(1), entry(engine="d"))
    held.kept(key(2), entry(engine="e"))
    assert held.excess("d", 0.0) == held.excess("e", 0.0) == []


def test_above_the_pressure_mark_the_engine_gets_back_what_it_lacks() -> None:
    held = ledger(pressure=0.8)
    for number in range(4):
        held.kept(key(number), entry())
    held.observed("d", load(usage=0.95))
    assert held.under_pressure("d")
    assert only(held).cap in range(2499, 2501)
    assert len(held.excess("d", 0.0)) == 2


def test_what_is_on_its_way_out_already_is_not_asked_for_again() -> None:
    held = ledger(pressure=0.8)
    held.kept(key(1), entry())
    held.observed("d", load(usage=0.95), leaving_tokens=2000)
    assert held.excess("d", 0.0) == []


@pytest.mark.parametrize(("usage", "tokens_left"), [(0.6, 2000), (0.4, 4000)])
def test_requests_that_wait_for_memory_get_half_of_it_back(usage: float, tokens_left: int) -> None:
    held = ledger()
    for number in range(4):
        held.kept(key(number), entry())
    held.observed("d", load(usage=usage, waiting=1))
    for gone in held.excess("d", 0.0):
        held.dropped(gone)
    assert only(held).tokens <= tokens_left
    assert held.under_pressure("d") is (usage > 0.5)


def test_pressure_without_a_known_capacity_only_shows_by_requests_that_wait() -> None:
    held = ledger()
    held.kept(key(1), entry())
    held.observed("d", load(usage=0.99, capacity=None))
    assert held.excess("d", 0.0) == []
    held.observed("d", load(usage=0.99, capacity=None, waiting=3))
    assert held.excess("d", 0.0) == [key(1)]


def test_with_the_pressure_gone_the_cap_grows_back_step_by_step() -> None:
    held = ledger(share=0.5, pressure=0.8)
    held.kept(key(1), entry())
    held.observed("d", load(usage=1.0))
    caps = [only(held).cap]
    for _ in range(12):
        held.observed("d", load(usage=0.2))
        caps.append(only(held).cap)
    assert caps[:3] == [0, 501, 1002]
    assert caps[-1] == 5000
    assert not held.under_pressure("d")


def test_an_engine_that_does_not_answer_is_forgotten_once_it_holds_nothing() -> None:
    held = ledger()
    held.kept(key(1), entry(), "10.0.0.7:8200")
    held.observed("d", load())
    held.observed("d", None)
    assert held.watched() == [("d", "10.0.0.7:8200")]
    assert not held.under_pressure("d")
    held.dropped(key(1))
    held.observed("d", None)
    assert held.watched() == held.engines() == []
    assert not held.under_pressure("d")


def test_an_engine_with_nothing_left_is_watched_on_or_its_cap_could_never_grow_back() -> None:
    held = ledger()
    held.kept(key(1), entry(), "10.0.0.7:8200")
    held.kept(key(2), entry(engine="e"))
    held.dropped(key(1))
    assert held.watched() == [("d", "10.0.0.7:8200")]


# --- who goes first -------------------------------------------------------------------------------------------------


def one_turn_chats_do_not_return(held: Ledger, **_: Any) -> None:
    """Teach the ledger that first turns are never followed and later ones are within seconds."""
    for number in range(100, 200):
        held.kept(key(number), entry(10, kind="first", since=-LIFE_SECONDS))
        held.kept(key(number + 1000), entry(10, kind="later", since=-LIFE_SECONDS))
        held.taken(key(number + 1000), -LIFE_SECONDS + 3)
    held.expire(0.0)


def test_those_less_likely_to_return_go_first() -> None:
    held = ledger(max_tokens=2500)
    one_turn_chats_do_not_return(held)
    for number, kind in enumerate(["later", "first", "later"]):
        held.kept(key(number), entry(kind=kind))
    assert held.excess("d", 1.0) == [key(1)]


def test_those_that_should_have_been_back_long_ago_go_first() -> None:
    held = ledger(max_tokens=2500)
    one_turn_chats_do_not_return(held)
    for number, since in enumerate([90.0, 0.0, 99.0]):
        held.kept(key(number), entry(since=since))
    assert held.excess("d", 100.0)[0] == key(1)


def test_short_turns_go_first_because_a_read_has_its_price_whatever_its_length() -> None:
    held = ledger(max_tokens=2000)
    held.kept(key(1), entry(1900))
    held.kept(key(2), entry(65))
    held.kept(key(3), entry(60))
    assert held.excess("d", 0.0)[:2] == [key(3), key(2)]


def test_one_long_and_hopeless_turn_does_not_outlive_many_short_and_likely_ones() -> None:
    held = ledger(max_tokens=5000)
    one_turn_chats_do_not_return(held)
    held.kept(key(0), entry(3000, kind="first"))
    for number in range(1, 5):
        held.kept(key(number), entry(600, kind="later"))
    assert held.excess("d", 1.0) == [key(0)]


def test_a_cap_that_is_passed_is_trimmed_a_little_below() -> None:
    held = ledger(max_tokens=10_000)
    for number in range(101):
        held.kept(key(number), entry(100))
    assert len(held.excess("d", 0.0)) == 6


# --- turns that P has read back ---------------------------------------------------------------------------------------


def test_a_turn_p_has_read_back_pins_nothing_but_is_still_waited_for() -> None:
    held = ledger()
    held.kept(key(1), entry())
    held.returned(key(1))
    assert only(held).tokens == only(held).turns == 0
    before = held.gaps.chances("later", LIFE_SECONDS)[0]
    held.taken(key(1), 3.0)
    assert held.gaps.chances("later", LIFE_SECONDS)[0] > before


def test_a_turn_p_has_read_back_can_fail_to_return_like_any_other() -> None:
    held = ledger()
    held.kept(key(1), entry())
    held.returned(key(1))
    before = held.gaps.chances("later", LIFE_SECONDS)[0]
    held.expire(LIFE_SECONDS)
    assert held.gaps.chances("later", LIFE_SECONDS)[0] < before
    held.returned(key(2))
    held.taken(key(1), LIFE_SECONDS)


def test_the_chance_of_a_kept_conversation_falls_while_it_stays_away() -> None:
    held = ledger()
    one_turn_chats_do_not_return(held)
    held.kept(key(1), entry())
    assert held.chance(key(1), 0.0) > 0.8 > held.chance(key(1), 100.0) > held.chance(key(2), 0.0) == 0.0
