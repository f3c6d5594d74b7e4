"""What the gateway remembers of the pools, and that it does not remember without end."""

from __future__ import annotations

from extproc.pool import PoolKnowledge


def test_nothing_is_known_at_first() -> None:
    pool = PoolKnowledge()
    assert (pool.digest_seen, pool.prompt_ids_differed) == (False, False)
    assert pool.block_size_tokens("engine") is None


def test_a_block_size_belongs_to_its_engine() -> None:
    pool = PoolKnowledge()
    pool.learn_block_size("a", 16)
    pool.learn_block_size("b", 32)
    pool.learn_block_size("a", 64)
    assert [pool.block_size_tokens(engine) for engine in ("a", "b", "c")] == [64, 32, None]


def test_two_pools_share_nothing() -> None:
    PoolKnowledge().learn_block_size("a", 16)
    assert PoolKnowledge().block_size_tokens("a") is None


def test_hazard_13_beyond_ten_thousand_engines_the_oldest_are_forgotten() -> None:
    pool = PoolKnowledge()
    for number in range(10_003):
        pool.learn_block_size(str(number), 16)
    known = [number for number in range(10_003) if pool.block_size_tokens(str(number)) is not None]
    assert known == list(range(3, 10_003))


def test_an_engine_that_says_its_block_size_again_makes_nobody_forgotten() -> None:
    pool = PoolKnowledge()
    for number in range(10_000):
        pool.learn_block_size(str(number), 16)
    pool.learn_block_size("9999", 32)
    assert pool.block_size_tokens("0") == 16
    assert pool.block_size_tokens("9999") == 32


def test_one_stock_worker_is_enough_to_count_on_no_plugin() -> None:
    """A stock D never frees the blocks of a turn it prefilled by itself, so none may be asked to."""
    pool = PoolKnowledge()
    assert not pool.plugin_everywhere
    pool.note_handle(has_digest=True)
    assert pool.plugin_everywhere
    pool.note_handle(has_digest=False)
    pool.note_handle(has_digest=True)
    assert pool.digest_seen
    assert not pool.plugin_everywhere
