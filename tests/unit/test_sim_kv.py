"""The KV model against an oracle that keeps, for every slot, the token and everything it attended to, spelled out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.sim import kv
from workers.sim.blocks import BlockPool
from workers.sim.sequence import SequenceKV

BLOCK_SIZE = 3
BLOCK_COUNT = 7
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class Oracle:
    """Slots in the open: each holds a number that stands for (token, all KV attended to), equal only for equal KV."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def kv(self, token: int, attended: tuple[int, ...]) -> int:
        return self.numbers.setdefault((token, attended), len(self.numbers) + 1)

    def right(self, tokens: list[int]) -> tuple[int, ...]:
        attended: tuple[int, ...] = ()
        for token in tokens:
            attended += (self.kv(token, attended),)
        return attended


class TwoPools(RuleBasedStateMachine):
    """Two workers compute, append, free, reuse and copy blocks of each other in every order."""

    @initialize()
    def start(self) -> None:
        self.oracle = Oracle()
        self.pools = [BlockPool(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, prefix_caching=False) for _ in range(2)]
        self.slots = [[[0] * BLOCK_SIZE for _ in range(BLOCK_COUNT + 1)] for _ in range(2)]
        self.sequences: list[tuple[int, SequenceKV, list[int]]] = []
        self.tuple_of: dict[bytes, tuple[int, ...]] = {}
        self.digest_of: dict[tuple[int, ...], bytes] = {}

    def attended(self, pool: int, sequence: SequenceKV, length: int) -> tuple[int, ...]:
        flat = [slot for block in sequence.blocks for slot in self.slots[pool][block]]
        return tuple(flat[:length])

    def set_slot(self, pool: int, sequence: SequenceKV, position: int, token: int) -> None:
        block, slot = sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        self.slots[pool][block][slot] = self.oracle.kv(token, self.attended(pool, sequence, position))

    def check(self, pool: int, sequence: SequenceKV, tokens: list[int]) -> None:
        attended = self.attended(pool, sequence, len(tokens))
        assert self.tuple_of.setdefault(sequence.attended, attended) == attended
        assert self.digest_of.setdefault(attended, sequence.attended) == sequence.attended

    @rule(
        pool=st.integers(0, 1),
        tokens=TOKENS,
        trusted=st.integers(0, 10),
        source=st.lists(st.integers(1, BLOCK_COUNT), max_size=4),
    )
    def compute(self, pool: int, tokens: list[int], trusted: int, source: list[int]) -> None:
        """A prompt arrives; some of it is taken from whatever blocks of the other worker a handle names."""
        sequence = SequenceKV(self.pools[pool], tokens, model="m", cache_salt="")
        needed = -(-len(tokens) // BLOCK_SIZE)
        if needed > self.pools[pool].free_count:
            return
        sequence.blocks = self.pools[pool].allocate(needed)
        copied = list(zip(sequence.blocks, source, self.pools[1 - pool].read(source), strict=False))
        for mine, theirs, memory in copied:
            self.pools[pool].load(mine, memory)
            self.slots[pool][mine] = list(self.slots[1 - pool][theirs])
        sequence.compute(min(trusted, len(copied) * BLOCK_SIZE))
        first = min(trusted, len(copied) * BLOCK_SIZE, len(tokens) - 1)
        for position in range(first, len(tokens)):
            self.set_slot(pool, sequence, position, tokens[position])
        self.check(pool, sequence, tokens)
        assert sequence.wrong == (self.attended(pool, sequence, len(tokens)) != self.oracle.right(tokens))
        self.sequences.append((pool, sequence, list(tokens)))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def append(self, which: int, token: int) -> None:
        pool, sequence, tokens = self.sequences[which % len(self.sequences)]
        if len(tokens) % BLOCK_SIZE == 0:
            if not self.pools[pool].free_count:
                return
            sequence.blocks += self.pools[pool].allocate(1)
        sequence.append(token)
        self.set_slot(pool, sequence, len(tokens), token)
        tokens.append(token)
        self.check(pool, sequence, tokens)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        pool, sequence, _ = self.sequences.pop(which % len(self.sequences))
        self.pools[pool].release(sequence.blocks)

    @invariant()
    def each_block_is_free_or_held_once(self) -> None:
        for index, pool in enumerate(getattr(self, "pools", [])):
            held = [block for owner, kept, _ in self.sequences if owner == index for block in kept.blocks]
            assert len(held) == len(set(held))
            assert pool.free_count == BLOCK_COUNT - len(held)
            assert all(pool.is_held(block) == (block in held) for block in range(1, BLOCK_COUNT + 1))


TestTwoPools = TwoPools.TestCase
TestTwoPools.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


def test_what_a_former_owner_left_in_later_slots_is_still_read() -> None:
    root = kv.root("m")
    old = kv.write(kv.EMPTY, 0, root, kv.pack([1, 2, 3]))
    new = kv.write(old, 0, root, kv.pack([9]))
    assert kv.attend(root, new, 3) != kv.attend(root, kv.write(kv.EMPTY, 0, root, kv.pack([9])), 3)
    assert not kv.holds(new, root, kv.pack([1, 2, 3]))


def test_a_token_computed_over_leftovers_is_not_one_computed_before_they_were_cut() -> None:
    root = kv.root("m")
    computed_before = kv.write(kv.write(kv.EMPTY, 0, root, kv.pack([1, 2, 3])), 0, root, kv.pack([9]))
    leftovers = kv.write(kv.write(kv.EMPTY, 0, root, kv.pack([1, 2])), 0, root, kv.pack([9]))
    computed_after = kv.write(leftovers, 2, root, kv.pack([3]))
    assert kv.attend(root, computed_before, 2) == kv.attend(root, computed_after, 2)
    assert kv.attend(root, computed_before, 3) != kv.attend(root, computed_after, 3)


def test_rewriting_the_same_kv_changes_nothing() -> None:
    root = kv.root("m")
    once = kv.write(kv.EMPTY, 0, root, kv.pack([1, 2, 3]))
    assert kv.write(once, 0, root, kv.pack([1])) == once


def test_the_model_is_part_of_the_kv() -> None:
    assert kv.root("base") != kv.root("lora")


def test_allocating_more_than_is_free_is_refused() -> None:
    pool = BlockPool(block_count=2, block_size=4, prefix_caching=True)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)


def test_blocks_are_handed_out_oldest_freed_first_and_a_sequence_from_its_end() -> None:
    pool = BlockPool(block_count=4, block_size=4, prefix_caching=True)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4) == [2, 1, 4, 3]


def test_a_freed_block_serves_as_cached_prefix_until_it_is_handed_out_again() -> None:
    pool = BlockPool(block_count=2, block_size=4, prefix_caching=True)
    (block,) = pool.allocate(1)
    pool.cache(block, ("", b"key"))
    pool.release([block])
    assert pool.cached_prefix([("", b"key"), ("", b"other")]) == [block]
    pool.allocate(2)
    assert pool.cached_prefix([("", b"key")]) == []


def test_an_adopted_block_is_freed_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(block_count=2, block_size=4, prefix_caching=True)
    (block,) = pool.allocate(1)
    pool.cache(block, ("", b"key"))
    pool.adopt([block])
    pool.release([block])
    assert pool.usage == 0.5
    pool.release([block])
    assert pool.usage == 0.0


def test_two_blocks_may_be_cached_under_one_key_and_either_serves() -> None:
    pool = BlockPool(block_count=2, block_size=4, prefix_caching=True)
    first, second = pool.allocate(2)
    pool.cache(first, ("", b"key"))
    pool.cache(second, ("", b"key"))
    pool.release([first])
    pool.allocate(1)
    assert pool.cached_prefix([("", b"key")]) == [second]
