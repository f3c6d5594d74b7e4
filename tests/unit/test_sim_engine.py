"""The simulated engine: what a handle does when used rightly, and how each wrong use shows. All without a socket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.engine import Engine, EngineDeadError, EngineSettings, ReadFailedError, Request, State
from workers.sim.text import IM_END, Model

BLOCK_SIZE = 4
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE_ALONE = {"do_remote_decode": False, "do_remote_prefill": False}
MODEL = Model(mean_answer_tokens=10_000)
names = itertools.count()


def engine(**options: Any) -> Engine:
    sizes = {"block_count": 64, "block_size": BLOCK_SIZE, "max_model_len": 256, "recompute_threshold_tokens": 4}
    return Engine(EngineSettings(**{**sizes, "prefix_caching": False, **options}))


def request(prompt: list[int], params: dict[str, Any] | None = None, max_tokens: int = 6, **options: Any) -> Request:
    def next_token(attended: bytes, generated: int) -> tuple[int, bool]:
        token = MODEL.next_token(attended, generated)
        return token, token == IM_END

    return Request(
        request_id=f"r{next(names)}",
        prompt=prompt,
        next_token=next_token,
        max_tokens=max_tokens,
        kv_transfer_params=None if params is None else dict(params),
        **options,
    )


class Pool:
    """Engines that reach each other, and a clock."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = {engine.engine_id: engine for engine in engines}
        self.now = 1000.0

    def fetch(self, engine: Engine, asked: Request) -> None:
        """Carry out the request's load."""
        load = asked.load
        if load is None:
            return
        memories = None
        peer = self.engines.get(load.engine_id)
        if peer is not None:
            try:
                memories = peer.serve_read(load.request_id, load.remote_blocks, load.expiry_time, self.now)
            except ReadFailedError:
                memories = None
        engine.finish_load(asked, memories, self.now)

    def run(self, engine: Engine, asked: Request) -> Request:
        """Run a request to its end, or as far as it gets."""
        engine.submit(asked)
        while asked.state is not State.FINISHED:
            engine.admit(self.now)
            self.fetch(engine, asked)
            if asked.state is not State.READY:
                engine.admit(self.now)  # once more, for a request whose read failed
                if asked.state is not State.READY:
                    return asked
            engine.prefill(asked)
            while asked.state is State.READY:
                engine.step(asked, self.now)
        return asked

    def turn(
        self, p: Engine, d: Engine, prompt: list[int], handle: dict[str, Any] | None = None
    ) -> tuple[Request, Request]:
        """Run both legs of a turn."""
        prefilled = self.run(p, request(prompt, handle or COLD, max_tokens=1))
        return prefilled, self.run(d, request(prompt, prefilled.handle))


def right(prompt: list[int], max_tokens: int = 6, block_size: int = BLOCK_SIZE) -> list[int]:
    """Return what is generated when all KV is right."""
    alone = engine(block_size=block_size, block_count=600)
    return Pool().run(alone, request(prompt, max_tokens=max_tokens)).generated


@pytest.fixture
def p() -> Engine:
    return engine()


@pytest.fixture
def d() -> Engine:
    return engine()


@pytest.fixture
def pool(p: Engine, d: Engine) -> Pool:
    return Pool(p, d)


PROMPT = list(range(300, 321))  # 21 tokens: five blocks and a bit


def first_turn(pool: Pool, p: Engine, d: Engine, prompt: list[int] = PROMPT) -> tuple[list[int], dict[str, Any]]:
    """Return the sequence whose KV D keeps and the handle to it."""
    _, decoded = pool.turn(p, d, prompt)
    assert decoded.handle is not None
    return [*prompt, *decoded.generated[:-1]], decoded.handle


# --- used rightly ---------------------------------------------------------------------------------------------------


def test_a_handle_covers_the_prompt_and_all_generated_tokens_but_the_last(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    assert handle["remote_num_tokens"] == len(PROMPT) + 6 - 1 == len(held)
    assert len(handle["remote_block_ids"][0]) == -(-len(held) // BLOCK_SIZE)


def test_a_proven_handle_saves_the_work_and_changes_no_token(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    prompt = [*held, 77, 78, 79]
    prefilled, decoded = pool.turn(p, d, prompt, handle)
    assert decoded.generated == right(prompt)
    assert prefilled.handle is not None
    assert prefilled.handle["remote_prefill_cached_tokens"] == len(held)
    assert (p.counters.wrong_kv_turns, d.counters.wrong_kv_turns) == (0, 0)


def test_reading_frees_the_retained_blocks_and_the_leased_ones(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    assert (len(d.retained), d.retained_tokens, len(p.leased)) == (1, len(held), 0)
    pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert (d.pool.free_count, len(d.retained), len(p.leased)) == (64, 0, 1)


def test_a_release_frees_the_blocks_and_reads_nothing(pool: Pool, p: Engine, d: Engine) -> None:
    _, handle = first_turn(pool, p, d)
    released = pool.run(p, request([0], {**handle, "remote_num_tokens": 0}, max_tokens=1))
    assert d.pool.free_count == 64
    assert (d.counters.handles_released, d.counters.handles_read, released.wrong_kv) == (1, 0, False)


def test_below_the_threshold_nothing_is_read_and_the_blocks_are_freed_all_the_same(d: Engine) -> None:
    p = engine(recompute_threshold_tokens=27)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    prefilled, _ = pool.turn(p, d, [*held, 7], handle)
    assert prefilled.trusted == 0
    assert d.counters.handles_released == 1


def test_a_handle_cut_to_the_proven_blocks_gives_right_kv(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    edited = [*held[:14], 999, *held[15:], 7]
    cut = {**handle, "remote_block_ids": [handle["remote_block_ids"][0][:3]], "remote_num_tokens": 3 * BLOCK_SIZE}
    prefilled, decoded = pool.turn(p, d, edited, cut)
    assert prefilled.trusted == 12
    assert decoded.generated == right(edited)


def test_the_local_prefix_cache_comes_first_and_only_the_rest_is_read(d: Engine) -> None:
    p = engine(prefix_caching=True)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    again = request([*held, 7], handle, max_tokens=1)
    p.submit(again)
    p.admit(pool.now)
    assert again.load is not None
    assert again.load.remote_blocks == tuple(handle["remote_block_ids"][0][5:])
    pool.fetch(p, again)
    p.prefill(again)
    assert not again.wrong_kv


def test_a_full_local_hit_only_leaves_the_notice_that_frees(d: Engine) -> None:
    p = engine(prefix_caching=True)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    pool.run(p, request([*held, *range(8)], max_tokens=1))
    pool.run(p, request([*held, *range(8)], handle, max_tokens=1))
    assert (d.counters.handles_released, d.pool.free_count) == (1, 64)


def test_a_decode_only_turn_gives_a_handle_too(pool: Pool, p: Engine, d: Engine) -> None:
    alone = pool.run(d, request(PROMPT, DECODE_ALONE))
    held = [*PROMPT, *alone.generated[:-1]]
    assert alone.handle is not None
    _, decoded = pool.turn(p, d, [*held, 7], alone.handle)
    assert decoded.generated == right([*held, 7])


@pytest.mark.parametrize("params", [None, {}])
def test_without_transfer_parameters_nothing_is_retained(pool: Pool, d: Engine, params: Any) -> None:
    assert pool.run(d, request(PROMPT, params)).handle is None
    assert d.pool.free_count == 64


def test_a_decode_worker_that_is_not_bidirectional_gives_no_handle(pool: Pool, p: Engine) -> None:
    d = engine(bidirectional=False)
    pool.engines[d.engine_id] = d
    _, decoded = pool.turn(p, d, PROMPT)
    assert decoded.handle is None
    assert decoded.generated == right(PROMPT)


# --- used wrongly ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewrite",
    [
        pytest.param(lambda held: [999, *held[1:], 7], id="first token edited"),
        pytest.param(lambda held: [*held[:8], *held[12:], 7], id="middle removed"),
        pytest.param(lambda held: held[:13], id="truncated"),
        pytest.param(lambda held: [*held[:-1], 999, 7], id="last held token differs"),
        pytest.param(lambda held: [7, *held], id="something put before it"),
    ],
)
def test_a_handle_attached_blindly_to_a_rewritten_history_shows(pool: Pool, p: Engine, d: Engine, rewrite: Any) -> None:
    held, handle = first_turn(pool, p, d)
    prompt = rewrite(held)
    prefilled, decoded = pool.turn(p, d, prompt, handle)
    assert (prefilled.wrong_kv, decoded.wrong_kv) == (True, True)
    assert decoded.generated != right(prompt)
    assert (p.counters.wrong_kv_turns, d.counters.wrong_kv_turns) == (1, 1)


def test_fewer_tokens_claimed_but_all_blocks_sent_reads_the_wrong_end(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    assert pool.turn(p, d, [*held, 7], {**handle, "remote_num_tokens": 12})[0].wrong_kv


def test_more_tokens_claimed_than_blocks_sent_kills_the_engine(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    with pytest.raises(EngineDeadError):
        pool.run(p, request([*held, 7], {**handle, "remote_block_ids": [handle["remote_block_ids"][0][:2]]}))
    assert p.dead
    with pytest.raises(EngineDeadError):
        p.submit(request(PROMPT))


def test_wrong_kv_poisons_the_prefix_cache_for_requests_without_any_handle(d: Engine) -> None:
    p = engine(prefix_caching=True)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d, PROMPT)
    edited = [999, *held[1:], 7]
    assert pool.run(p, request(edited, handle, max_tokens=1)).wrong_kv
    assert p.counters.poisoned_blocks_cached > 0
    bystander = pool.run(p, request([*edited, 8]))
    assert bystander.wrong_kv
    assert bystander.generated != right([*edited, 8])


def test_a_second_use_is_counted_and_reads_what_lies_there_then(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert not pool.run(p, request([*held, 7], handle, max_tokens=1)).wrong_kv  # nobody took the blocks meanwhile
    pool.run(d, request(list(range(900, 1150)), DECODE_ALONE))  # somebody does
    again = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert again.wrong_kv
    assert d.counters.handles_used_twice == 2


def test_the_kv_of_another_model_is_wrong_kv(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    assert pool.run(p, request([*held, 7], handle, max_tokens=1, model="a-lora")).wrong_kv


def test_a_decode_leg_for_another_prompt_than_was_prefilled_shows(pool: Pool, p: Engine, d: Engine) -> None:
    prefilled = pool.run(p, request(PROMPT, COLD, max_tokens=1))
    assert pool.run(d, request([*PROMPT[:-3], 1, 2, 3], prefilled.handle)).wrong_kv


# --- time -----------------------------------------------------------------------------------------------------------


def test_retained_blocks_are_freed_when_their_time_is_over(pool: Pool, p: Engine, d: Engine) -> None:
    first_turn(pool, p, d)
    assert d.next_deadline() == pool.now + 480
    d.expire(pool.now + 479.9)
    assert len(d.retained) == 1
    d.expire(pool.now + 480)
    assert (len(d.retained), d.pool.free_count, d.counters.handles_expired) == (0, 64, 1)


def test_a_read_five_seconds_before_the_end_is_declined_and_parks_the_request(p: Engine) -> None:
    d = engine(clock_offset_seconds=-5e6)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    pool.now += 475
    late = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert late.state is State.PARKED
    assert len(d.retained) == 1


def test_a_read_of_blocks_that_do_not_exist_fails(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    nowhere = {**handle, "remote_block_ids": [[900 + index for index in range(7)]]}
    assert pool.run(p, request([*held, 7], nowhere, max_tokens=1)).state is State.PARKED


def test_a_read_just_before_that_is_served(p: Engine) -> None:
    d = engine(clock_offset_seconds=-5e6)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    pool.now += 474.9
    assert pool.run(p, request([*held, 7], handle, max_tokens=1)).finish_reason == "length"


def test_with_the_failure_policy_fail_a_declined_read_ends_the_request(d: Engine) -> None:
    p = engine(load_failure_policy="fail")
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    pool.now += 479
    late = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert (late.finish_reason, late.handle, p.pool.free_count) == ("error", None, 64)


def test_a_read_after_the_end_without_the_expiry_time_gets_whatever_lies_there(
    pool: Pool, p: Engine, d: Engine
) -> None:
    held, handle = first_turn(pool, p, d)
    pool.now += 481
    pool.run(p, request([*held, 7], {**handle, "remote_blocks_expiry_time": None}, max_tokens=1))
    assert d.counters.handles_used_late == 1


def test_a_prefill_workers_blocks_wait_thirty_seconds_or_as_long_as_heartbeats_come(pool: Pool, p: Engine) -> None:
    prefilled = pool.run(p, request(PROMPT, COLD, max_tokens=1))
    p.renew(prefilled.request_id, pool.now + 29)
    p.expire(pool.now + 58.9)
    assert len(p.leased) == 1
    p.expire(pool.now + 59)
    assert (len(p.leased), p.pool.free_count, p.counters.leases_expired) == (0, 64, 1)


def test_a_handle_of_a_restarted_worker_fails_and_on_a_prefill_worker_parks(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    del pool.engines[d.engine_id]
    assert pool.run(p, request([*held, 7], handle, max_tokens=1)).state is State.PARKED
    assert p.counters.reads_failed == 1


def test_a_decode_worker_whose_prefill_worker_is_gone_computes_the_prompt_itself(
    pool: Pool, p: Engine, d: Engine
) -> None:
    prefilled = pool.run(p, request(PROMPT, COLD, max_tokens=1))
    del pool.engines[p.engine_id]
    decoded = pool.run(d, request(PROMPT, prefilled.handle))
    assert decoded.generated == right(PROMPT)
    assert d.counters.prompt_tokens_computed == len(PROMPT)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_retained_blocks_keep_others_waiting_until_they_are_freed() -> None:
    d = engine(block_count=16, max_model_len=64, repaired=True)
    pool = Pool(d)
    pool.run(d, request(list(range(40)), DECODE_ALONE))  # keeps 12 blocks
    waiting = request(list(range(100, 120)))
    d.submit(waiting)
    assert d.admit(pool.now + 479) == []
    assert d.admit(pool.now + 480) == [waiting]


def test_requests_start_in_the_order_they_came() -> None:
    d = engine(block_count=16, max_model_len=64)
    big, small = request(list(range(60))), request(list(range(4)))
    for asked in (request(list(range(200, 220))), big, small):
        d.submit(asked)
    assert len(d.admit(0.0)) == 1
    assert list(d.waiting) == [big, small]


def test_a_request_that_runs_out_of_blocks_starts_over_and_says_the_same() -> None:
    d = engine(block_count=8, max_model_len=32)
    first, second = request(list(range(12)), max_tokens=10), request(list(range(50, 62)), max_tokens=10)
    for asked in (first, second):
        d.submit(asked)
    while State.FINISHED not in {first.state, second.state} or first.state is not second.state:
        for asked in d.admit(0.0):
            d.prefill(asked)
        for asked in (first, second):
            if asked.state is State.READY:
                d.step(asked, 0.0)
    assert d.counters.preemptions > 0
    assert (first.generated, second.generated) == (right(list(range(12)), 10), right(list(range(50, 62)), 10))
    assert (d.pool.free_count, d.counters.turns) == (8, 2)


def test_an_abort_frees_at_every_stage(pool: Pool, p: Engine, d: Engine) -> None:
    held, handle = first_turn(pool, p, d)
    waiting, running, loading = request(PROMPT), request(PROMPT), request([*held, 7], handle, max_tokens=1)
    for asked in (running, loading):
        p.submit(asked)
    p.admit(pool.now)
    p.submit(waiting)
    p.prefill(running)
    p.step(running, pool.now)
    for asked in (waiting, running, loading):
        p.abort(asked, pool.now)
        p.abort(asked, pool.now)  # harmless
    assert p.pool.free_count == 64 - 7  # the peer's blocks are still being copied into those of `loading`
    pool.fetch(p, loading)
    assert (p.pool.free_count, len(p.waiting), loading.handle) == (64, 0, None)


def test_a_prefill_worker_that_is_not_bidirectional_parks_a_handle_and_an_abort_leaks_its_blocks(d: Engine) -> None:
    p = engine(bidirectional=False)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    parked = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert (parked.state, len(d.retained)) == (State.PARKED, 1)
    p.abort(parked, pool.now)
    assert (p.pool.free_count, p.counters.blocks_leaked) == (64 - 7, 7)


def test_a_repaired_prefill_worker_computes_what_it_could_not_read(d: Engine) -> None:
    p = engine(repaired=True)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    pool.now += 476
    done = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert (done.state, p.counters.requests_parked, p.counters.blocks_leaked) == (State.FINISHED, 0, 0)
    assert p.counters.reads_failed == 1
    assert done.generated == right([*held, 7], 1)


def test_a_repaired_prefill_worker_that_is_not_bidirectional_computes_the_prompt(d: Engine) -> None:
    p = engine(repaired=True, bidirectional=False)
    pool = Pool(p, d)
    held, handle = first_turn(pool, p, d)
    done = pool.run(p, request([*held, 7], handle, max_tokens=1))
    assert (done.state, done.generated) == (State.FINISHED, right([*held, 7], 1))


@pytest.mark.parametrize("repaired", [False, True])
def test_a_turn_without_a_prefill_leg_is_let_go_by_repaired_decode_workers_only(*, repaired: bool) -> None:
    p, d = engine(), engine(repaired=repaired)
    pool = Pool(p, d)
    handles = [pool.run(d, request(PROMPT, DECODE_ALONE)).handle for _ in range(2)]
    held = d.pool.block_count - d.pool.free_count
    pool.run(p, request(PROMPT, {**handles[0], "remote_num_tokens": 0}, max_tokens=1))  # a release
    d.expire(pool.now + 10_000)
    assert d.counters.handles_released == 1
    left = d.pool.block_count - d.pool.free_count
    assert (left, d.counters.blocks_leaked) == ((0, 0) if repaired else (held, held))


def test_a_read_after_a_release_is_late_and_not_a_second_use(pool: Pool, p: Engine, d: Engine) -> None:
    """A reader that was given up may be so slow that its handle has been released meanwhile."""
    held, handle = first_turn(pool, p, d)
    given_up = request([*held, 7], handle, max_tokens=1)
    p.submit(given_up)
    p.admit(pool.now)
    p.abort(given_up, pool.now)
    pool.run(p, request([0], {**handle, "remote_num_tokens": 0}, max_tokens=1))
    pool.fetch(p, given_up)
    assert (d.counters.handles_released, d.counters.handles_used_late, d.counters.handles_used_twice) == (1, 1, 0)
    assert (p.counters.wrong_kv_turns, p.counters.poisoned_blocks_cached) == (0, 0)


def test_an_aborted_turn_gives_no_handle(pool: Pool, d: Engine) -> None:
    asked = request(PROMPT, DECODE_ALONE)
    d.submit(asked)
    d.admit(pool.now)
    d.prefill(asked)
    d.step(asked, pool.now)
    d.abort(asked, pool.now)
    assert (asked.handle, d.pool.free_count) == (None, 64)


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    d = engine(prefix_caching=True)
    pool = Pool(d)
    pool.run(d, request(PROMPT, cache_salt="mine"))
    assert pool.run(d, request(PROMPT, cache_salt="yours")).trusted == 0
    assert pool.run(d, request(PROMPT, cache_salt="mine")).trusted == 20


# --- whatever happens -----------------------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 60), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.booleans()
    ),
    max_size=30,
)


@given(turns=TURNS, caching=st.booleans(), block_size=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_the_proven_prefix_never_gives_wrong_kv(turns: Any, caching: bool, block_size: int) -> None:
    """Three conversations are cut, extended, forked and regenerated at random; each handle serves what it really covers."""
    options = {"prefix_caching": caching, "block_size": block_size, "block_count": 600, "recompute_threshold_tokens": 1}
    p, d = engine(**options), engine(**options)
    pool = Pool(p, d)
    histories: dict[int, list[int]] = {}
    kept: dict[int, tuple[list[int], dict[str, Any]]] = {}
    for conversation, keep, new, attach in turns:
        prompt = [*histories.get(conversation, [])[:keep], *new]
        held, handle = kept.pop(conversation, ([], {}))
        proven = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
        )
        whole = proven == len(held) < len(prompt)
        blocks = min(proven, len(prompt) - 1) // block_size
        if not whole:
            cut = {"remote_block_ids": [ids[:blocks] for ids in handle.get("remote_block_ids", ())]}
            handle = {**handle, **cut, "remote_num_tokens": blocks * block_size}
        prefilled, decoded = pool.turn(p, d, prompt, handle if attach and (whole or blocks) and held else None)
        assert decoded.generated == right(prompt, block_size=block_size)
        assert not prefilled.wrong_kv
        histories[conversation] = [*prompt, *decoded.generated]
        assert decoded.handle is not None
        kept[conversation] = (histories[conversation][:-1], decoded.handle)
        pool.now += 1
    for each in (p, d):
        each.expire(pool.now + 1000)
        assert (each.pool.free_count, each.counters.wrong_kv_turns, each.counters.handles_used_twice) == (600, 0, 0)


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    edited=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    claimed=st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_a_turn_is_called_wrong_exactly_when_its_text_is(prompt: list[int], edited: list[int], claimed: int) -> None:
    p, d = engine(recompute_threshold_tokens=1), engine()
    pool = Pool(p, d)
    _, decoded = pool.turn(p, d, prompt)
    assert decoded.handle is not None
    handle = {**decoded.handle, "remote_num_tokens": min(claimed, decoded.handle["remote_num_tokens"])}
    prefilled, again = pool.turn(p, d, edited, handle)
    assert prefilled.wrong_kv == again.wrong_kv == (again.generated != right(edited))
