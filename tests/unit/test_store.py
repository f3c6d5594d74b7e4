"""The store against a plain list of what should be in it, through any sequence of operations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.handle import Handle
from extproc.identity import ConversationKey
from extproc.proof import Sequence, fingerprint
from extproc.store import Dropped, MemoryStore, StoredTurn

MAX_CONVERSATIONS = 4
LIFETIME_SECONDS = 10.0


def key(number: int) -> ConversationKey:
    return ConversationKey(bytes([number]) * 16)


def turn(
    engine_id: str = "engine-a",
    *,
    host: str = "10.0.0.1",
    port: int = 5600,
    size: int = 100,
    deadline: float = 0.0,
    sequence: Sequence | None = None,
) -> StoredTurn:
    handle = Handle(
        raw=b"x" * size,
        engine_id=engine_id,
        host=host,
        port=port,
        tokens=64,
        blocks_per_group=(2,),
        tokens_per_block_may_vary=False,
    )
    return StoredTurn(handle, sequence or fingerprint([]), 32, "model", deadline)


BASE_BYTES = turn(size=0).size_bytes
MAX_BYTES = 3 * BASE_BYTES + 400


def reasons(dropped: list[Dropped]) -> list[str]:
    return [drop.reason for drop in dropped]


class StoreMachine(RuleBasedStateMachine):
    """``self.kept`` is the model: (key, turn) in the order of insertion. Time only goes forward, as clocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(max_conversations=MAX_CONVERSATIONS, max_bytes=MAX_BYTES)
        self.kept: list[tuple[ConversationKey, StoredTurn]] = []
        self.engine_at: dict[tuple[str, int], str] = {}
        self.engine_number = 0
        self.now = 100.0

    def drop(self, wanted: Any) -> list[StoredTurn]:
        gone = [entry for entry in self.kept if wanted(*entry)]
        self.kept = [entry for entry in self.kept if entry not in gone]
        return [kept for _, kept in gone]

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        number=st.integers(0, 5),
        size=st.sampled_from([0, 100, 400, 3 * BASE_BYTES]),
        place=st.integers(0, 1),
        restarted=st.booleans(),
    )
    def put(self, number: int, size: int, place: int, *, restarted: bool) -> None:
        address = ("10.0.0.1", 5600 + place)
        previous = self.engine_at.get(address)
        if restarted or previous is None:
            self.engine_number += 1
            self.engine_at[address] = f"engine-{self.engine_number}"
        engine = self.engine_at[address]
        new = turn(engine, port=address[1], size=size, deadline=self.now + LIFETIME_SECONDS)

        expected: list[tuple[str, StoredTurn]] = []
        if previous != engine:
            gone = self.drop(lambda _, kept: kept.handle.engine_id == previous)
            expected += [("engine_gone", kept) for kept in gone]
        expected += [("superseded", kept) for kept in self.drop(lambda owner, _: owner == key(number))]
        if new.size_bytes > MAX_BYTES:
            expected.append(("evicted", new))
        else:
            self.kept.append((key(number), new))
        while len(self.kept) > MAX_CONVERSATIONS or sum(kept.size_bytes for _, kept in self.kept) > MAX_BYTES:
            expected.append(("evicted", self.kept.pop(0)[1]))

        dropped = self.store.put(key(number), new)
        assert sorted((drop.reason, id(drop.turn)) for drop in dropped) == sorted(
            (reason, id(kept)) for reason, kept in expected
        )
        evicted = [drop.turn for drop in dropped if drop.reason == "evicted"]
        assert evicted == [kept for reason, kept in expected if reason == "evicted"]

    @rule(number=st.integers(0, 5))
    def take(self, number: int) -> None:
        expected = self.drop(lambda owner, _: owner == key(number))
        taken = self.store.take(key(number))
        assert ([] if taken is None else [taken]) == expected
        assert self.store.take(key(number)) is None, "a handle may be used once"

    @rule()
    def expire(self) -> None:
        expected = self.drop(lambda _, kept: kept.deadline <= self.now)
        dropped = self.store.expire(self.now)
        assert [drop.turn for drop in dropped] == expected
        assert set(reasons(dropped)) <= {"expired"}

    @rule(number=st.integers(1, 6))
    def discard_engine(self, number: int) -> None:
        expected = self.drop(lambda _, kept: kept.handle.engine_id == f"engine-{number}")
        dropped = self.store.discard_engine(f"engine-{number}")
        assert sorted(id(drop.turn) for drop in dropped) == sorted(map(id, expected))
        assert set(reasons(dropped)) <= {"engine_gone"}

    @rule()
    def drain(self) -> None:
        dropped = self.store.drain()
        assert [drop.turn for drop in dropped] == [kept for _, kept in self.kept]
        assert set(reasons(dropped)) <= {"draining"}
        self.kept = []
        assert (len(self.store), self.store.size_bytes) == (0, 0)

    @invariant()
    def counts_what_it_keeps(self) -> None:
        assert len(self.store) == len(self.kept) <= MAX_CONVERSATIONS
        assert self.store.size_bytes == sum(kept.size_bytes for _, kept in self.kept) <= MAX_BYTES

    @invariant()
    def knows_what_each_engine_holds(self) -> None:
        shares = {share.engine_id: (share.turns, share.tokens) for share in self.store.engines()}
        engines = [kept.handle.engine_id for _, kept in self.kept]
        assert shares == {engine: (engines.count(engine), 64 * engines.count(engine)) for engine in engines}

    def teardown(self) -> None:
        self.store.drain()
        assert (len(self.store), self.store.size_bytes) == (0, 0)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=60, stateful_step_count=30)


def test_hazard_07_a_kept_turn_is_taken_once() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    kept = turn()
    assert store.put(key(1), kept) == []
    assert store.take(key(1)) is kept
    assert store.take(key(1)) is None


def test_a_new_turn_supersedes_the_conversations_last() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    first, second = turn(), turn()
    store.put(key(1), first)
    assert store.put(key(1), second) == [Dropped(first, "superseded")]
    assert store.take(key(1)) is second


def test_hazard_17_beyond_the_bound_the_oldest_make_room() -> None:
    store = MemoryStore(max_conversations=2, max_bytes=10**6)
    turns = [turn() for _ in range(5)]
    dropped = [drop.turn for number, new in enumerate(turns) for drop in store.put(key(number), new)]
    assert [id(kept) for kept in dropped] == [id(kept) for kept in turns[:3]]
    assert len(store) == 2


def test_hazard_17_a_turn_put_again_is_the_youngest() -> None:
    store = MemoryStore(max_conversations=2, max_bytes=10**6)
    for number in (1, 2, 1):
        store.put(key(number), turn())
    store.put(key(3), turn())
    assert store.take(key(2)) is None
    assert store.take(key(1)) is not None


def test_a_turn_larger_than_the_whole_store_costs_nobody_else_a_handle() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=MAX_BYTES)
    store.put(key(1), turn())
    too_large = turn(size=MAX_BYTES)
    assert store.put(key(2), too_large) == [Dropped(too_large, "evicted")]
    assert store.take(key(1)) is not None


def test_turns_may_fill_the_store_to_the_last_byte() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=2 * BASE_BYTES + 200)
    assert store.put(key(1), turn(size=200 + BASE_BYTES)) == []
    assert store.put(key(1), turn(size=100)) != []
    assert store.put(key(2), turn(size=100)) == []
    assert store.size_bytes == 2 * BASE_BYTES + 200


@pytest.mark.parametrize(("now", "expired"), [(9.999, 0), (10.0, 1), (10.5, 1), (20.0, 2)])
def test_hazard_06_a_turn_expires_at_its_deadline(now: float, expired: int) -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn(deadline=10.0))
    store.put(key(2), turn(deadline=20.0))
    assert len(store.expire(now)) == expired
    assert len(store) == 2 - expired


def test_hazard_13_a_new_engine_at_a_known_address_ends_the_old_ones_turns() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn("old"))
    store.put(key(2), turn("old"))
    store.put(key(3), turn("elsewhere", host="10.0.0.2"))
    assert reasons(store.put(key(4), turn("new"))) == ["engine_gone", "engine_gone"]
    assert [store.take(key(number)) is not None for number in (1, 2, 3, 4)] == [False, False, True, True]


def test_hazard_13_an_engine_that_is_gone_takes_its_turns_along() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn("a"))
    store.put(key(2), turn("b", port=5601))
    assert reasons(store.discard_engine("a")) == ["engine_gone"]
    assert store.discard_engine("a") == []
    assert store.take(key(2)) is not None


def test_a_taken_turn_that_was_not_sent_can_be_given_back_once() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn())
    taken = store.take(key(1))
    assert taken is not None
    assert store.restore(key(1), taken) == []
    assert store.take(key(1)) is taken
    assert store.take(key(1)) is None


def test_what_was_given_back_does_not_displace_a_newer_turn() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    old, new = turn(), turn()
    store.put(key(1), new)
    assert store.restore(key(1), old) == [Dropped(old, "superseded")]
    assert store.take(key(1)) is new


def test_a_turn_of_an_engine_replaced_meanwhile_cannot_be_given_back() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    old = turn("old")
    store.put(key(1), old)
    store.take(key(1))
    store.put(key(2), turn("new"))
    assert store.restore(key(1), old) == [Dropped(old, "engine_gone")]
    assert store.take(key(2)) is not None


@pytest.mark.parametrize("name", ["rank-0", "10.0.0.1:5600"])
def test_an_engine_about_to_stop_is_found_by_id_or_by_the_address_in_its_handles(name: str) -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn("rank-0", port=5600))
    store.put(key(2), turn("rank-1", port=5601))
    assert store.find_engines(name) == ["rank-0"]
    assert store.find_engines("10.0.0.1") == ["rank-0", "rank-1"]
    assert reasons(store.discard_engine("rank-0", "engine_draining")) == ["engine_draining"]
    assert len(store) == 1


def test_hazard_42_two_ranks_at_one_host_do_not_end_each_other() -> None:
    store = MemoryStore(max_conversations=10, max_bytes=10**6)
    store.put(key(1), turn("rank-0", port=5600))
    assert store.put(key(2), turn("rank-1", port=5601)) == []
    assert len(store) == 2


def test_a_turn_costs_its_handle_its_digests_and_an_overhead() -> None:
    plain = turn(size=0).size_bytes
    assert turn(size=1000).size_bytes == plain + 1000
    assert turn(size=0, sequence=fingerprint(range(64))).size_bytes == plain + 32
