"""What may be attached, judged by a model of what vLLM's prefill worker does with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import pairs

from extproc.handle import read_publication
from extproc.proof import Sequence, fingerprint
from extproc.receipt import Reason
from extproc.reuse import Attachment, prove
from extproc.store import StoredTurn


def stored(
    tokens: int, sequence: Sequence, block_size: int, *, groups: int = 1, extra_blocks: int = 0, **changes: Any
) -> StoredTurn:
    """A turn D keeps ``tokens`` tokens of, in blocks numbered from 100, and of which ``sequence`` is known."""
    block_count = -(-tokens // block_size) + extra_blocks
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(100 * (n + 1), 100 * (n + 1) + block_count)) for n in range(groups)],
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 12345.678901234,
        "x_new": [{}],
    }
    handle = read_publication(json.dumps(params | changes).encode()).handle
    return StoredTurn(handle, sequence, block_size, "model", 0.0)


def tokens_p_would_read(params: dict[str, Any], prompt: list[int], held: list[int], block_size: int) -> list[list[int]]:
    """For each leading prompt token that P copies: the history it was really computed after, on D, and itself.

    Model of vLLM 0.32 ``nixl/pull_scheduler.py`` and ``base_worker.py``: P takes the smaller of the handle's tokens and
    the prompt's, allocates blocks for them, and when D lists more blocks than that, drops them from the *front*.
    """
    (remote_blocks,) = params["remote_block_ids"]
    count = min(params["remote_num_tokens"], len(prompt))
    local_blocks = -(-count // block_size)
    assert local_blocks <= len(remote_blocks), "P would wait for blocks that D does not have"
    read_blocks = remote_blocks[len(remote_blocks) - local_blocks :]
    read = []
    for position in range(count):
        place_on_d = (read_blocks[position // block_size] - 100) * block_size + position % block_size
        read.append(held[: place_on_d + 1])
    return read


few_ids = st.integers(0, 1)


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    """(tokens D ran, next prompt, tokens D keeps, tokens kvloop knows, block size): every way a history may go on."""
    block_size = draw(st.sampled_from([1, 2, 3, 8, 16, 32, 48]))
    start = draw(st.lists(few_ids, max_size=6)) * draw(st.sampled_from([1, 10, 16]))
    held = start + draw(st.lists(few_ids, min_size=1, max_size=40))
    prompt = draw(
        st.sampled_from([held, held[:-1], held[1:], start, held[: len(held) // 2]])
        | st.integers(0, len(held)).map(lambda at: held[:at] + held[at + 1 :])
    ) + draw(st.lists(few_ids, max_size=40))
    kept = draw(st.just(len(held)) | st.integers(1, len(held)))
    known = draw(st.just(kept) | st.integers(0, len(held)))
    return held, prompt, kept, known, block_size


@given(turns(), st.sampled_from([1, 16, 64]), st.sampled_from([0, 0, 1]))
def test_hazard_01_02_03_04_05_whatever_is_attached_was_computed_from_exactly_this_prompt(
    turn: tuple[list[int], list[int], int, int, int], min_tokens: int, extra_blocks: int
) -> None:
    held, prompt, kept, known, block_size = turn
    kept_turn = stored(kept, fingerprint(held[:known]), block_size, extra_blocks=extra_blocks)
    verdict = prove(kept_turn, prompt, block_size_tokens=block_size, min_tokens=min_tokens)
    if isinstance(verdict, Reason):
        return
    params = json.loads(verdict.params)
    assert params["remote_num_tokens"] == verdict.tokens >= min_tokens
    assert verdict.tokens < len(prompt), "P would trim the blocks of a prompt that is not longer"
    assert verdict.tokens <= min(kept, known)
    assert not extra_blocks, "P takes blocks from the end: one too many shifts every token"
    assert len(params["remote_block_ids"][0]) == -(-verdict.tokens // block_size)
    read = tokens_p_would_read(params, prompt, held, block_size)
    assert read == [prompt[: position + 1] for position in range(verdict.tokens)]


@given(turns())
def test_hazard_44_what_is_not_cut_goes_through_byte_for_byte(turn: tuple[list[int], list[int], int, int, int]) -> None:
    held, prompt, kept, known, block_size = turn
    kept_turn = stored(kept, fingerprint(held[:known]), block_size)
    verdict = prove(kept_turn, prompt, block_size_tokens=block_size, min_tokens=1)
    if isinstance(verdict, Attachment):
        uncut = [pair for pair in pairs(kept_turn.handle.raw) if pair[0] not in CUT]
        assert [pair for pair in pairs(verdict.params) if pair[0] not in CUT] == uncut
        assert verdict.is_whole == (verdict.params == kept_turn.handle.raw) or verdict.tokens == kept


CUT = ("remote_block_ids", "remote_num_tokens")


@given(turns(), st.sampled_from([None, "other"]))
def test_blocks_that_cannot_be_checked_are_not_attached(
    turn: tuple[list[int], list[int], int, int, int], block_size_known: str | None
) -> None:
    held, prompt, kept, known, block_size = turn
    guess = None if block_size_known is None else block_size * (kept + 1)
    kept_turn = stored(kept, fingerprint(held[:known]), block_size)
    verdict = prove(kept_turn, prompt, block_size_tokens=guess, min_tokens=1)
    if guess is None:
        assert verdict is Reason.BLOCK_SIZE_UNKNOWN
    elif len(json.loads(kept_turn.handle.raw)["remote_block_ids"][0]) > 1:
        assert verdict is Reason.BLOCKS_UNEXPLAINED


@given(turns(), st.sampled_from([None, "right", "other"]))
def test_a_handle_that_cannot_be_cut_is_attached_whole_or_not_at_all(
    turn: tuple[list[int], list[int], int, int, int], block_size_known: str | None
) -> None:
    held, prompt, kept, known, block_size = turn
    guess = {None: None, "right": block_size, "other": 2 * kept}[block_size_known]
    kept_turn = stored(kept, fingerprint(held[:known]), block_size, groups=2)
    verdict = prove(kept_turn, prompt, block_size_tokens=guess, min_tokens=1)
    if isinstance(verdict, Attachment):
        assert verdict == Attachment(kept_turn.handle.raw, kept, is_whole=True)
        assert prompt[:kept] == held[:kept]
        assert len(prompt) > kept


@given(st.lists(few_ids, min_size=64, max_size=100), st.lists(few_ids, min_size=1, max_size=5))
def test_a_continued_history_is_attached_whole(held: list[int], suffix: list[int]) -> None:
    turn = stored(len(held), fingerprint(held), 16)
    verdict = prove(turn, held + suffix, block_size_tokens=16, min_tokens=64)
    assert verdict == Attachment(turn.handle.raw, len(held), is_whole=True)


HELD = list(range(200))


@pytest.mark.parametrize(
    ("prompt", "known", "block_size", "min_tokens", "expected"),
    [
        ([*HELD, 7], 200, 16, 64, (200, True)),
        (HELD, 200, 16, 64, (192, False)),
        (HELD[:193], 200, 16, 64, (192, False)),
        (HELD[:192], 200, 16, 64, (176, False)),
        ([*HELD[:150], 7, 7], 200, 16, 64, (128, False)),
        ([*HELD[:64], 7, 7], 200, 16, 64, (64, False)),
        ([*HELD[:70], 7, 7], 70, 16, 64, (64, False)),
        ([*HELD, 7], 150, 16, 64, (144, False)),
        ([*HELD, 7], 200, None, 64, Reason.BLOCK_SIZE_UNKNOWN),
        ([*HELD[:150], 7, 7], 200, 16, 145, Reason.HISTORY_DIFFERS),
        ([*HELD[:50], 7, 7], 200, 16, 64, Reason.HISTORY_DIFFERS),
        ([], 200, 16, 64, Reason.HISTORY_DIFFERS),
        ([7, 7], 0, 16, 64, Reason.TOO_SHORT),
        ([*HELD, 7], 200, 16, 201, Reason.TOO_SHORT),
        (HELD, 200, 16, 200, Reason.TOO_SHORT),
        (HELD, 200, 16, 193, Reason.TOO_SHORT),
        ([*HELD, 7], 60, 16, 64, Reason.TOO_SHORT),
    ],
)
def test_hazard_04_each_way_a_history_goes_on_has_its_verdict(
    prompt: list[int], known: int, block_size: int | None, min_tokens: int, expected: Any
) -> None:
    turn = stored(200, fingerprint(HELD[:known]), block_size or 16)
    verdict = prove(turn, prompt, block_size_tokens=block_size, min_tokens=min_tokens)
    found = (verdict.tokens, verdict.is_whole) if isinstance(verdict, Attachment) else verdict
    assert found == expected


def test_more_known_tokens_than_kept_ones_never_stretch_the_claim() -> None:
    turn = stored(100, fingerprint(HELD), 16)
    assert prove(turn, [*HELD, 7], block_size_tokens=16, min_tokens=64) == Attachment(
        turn.handle.raw, 100, is_whole=True
    )
    cut = prove(turn, HELD[:100], block_size_tokens=16, min_tokens=64)
    assert isinstance(cut, Attachment)
    assert cut.tokens == 96
