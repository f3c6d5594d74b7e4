"""The proof against the obvious comparison, token by token: never more than true, and exact where it promises to be."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import token_ids

from extproc.proof import (
    CHUNK_TOKENS,
    DIGEST_BYTES,
    common_prefix,
    fingerprint,
    from_json,
    prompt_end,
    prompt_end_from_json,
    prompt_end_to_json,
    to_json,
)

few_ids = st.integers(0, 2)
"""Few values, so that sequences agree for a while by accident."""
lengths = st.integers(0, 4 * CHUNK_TOKENS) | st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 96])


@st.composite
def two_prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A held sequence and a prompt that shares some beginning with it, as histories do."""
    shared = draw(
        st.builds(lambda unit, length: (unit * length)[:length], st.lists(few_ids, min_size=1, max_size=5), lengths)
    )
    ends = st.lists(few_ids, max_size=2 * CHUNK_TOKENS + 3)
    return shared + draw(ends), shared + draw(ends)


def shared_tokens(left: list[int], right: list[int]) -> int:
    """How many leading tokens really are equal."""
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@given(two_prompts())
def test_the_proof_is_never_more_than_true_by_chunks_and_exact_in_the_tail(
    prompts: tuple[list[int], list[int]],
) -> None:
    held, prompt = prompts
    shared = shared_tokens(held, prompt)
    proven = common_prefix(fingerprint(held), prompt)
    assert proven <= shared
    whole = len(held) // CHUNK_TOKENS * CHUNK_TOKENS
    assert proven == (shared if shared >= whole else shared // CHUNK_TOKENS * CHUNK_TOKENS)


@given(st.lists(token_ids, max_size=70), st.lists(token_ids, max_size=40))
def test_a_continued_history_is_proven_to_its_last_token(held: list[int], suffix: list[int]) -> None:
    assert common_prefix(fingerprint(held), held + suffix) == len(held)


@given(lengths.filter(bool), st.data())
def test_hazard_04_one_edited_token_ends_the_proof_there(length: int, data: st.DataObject) -> None:
    held = list(range(length))
    at = data.draw(st.integers(0, length - 1))
    prompt = [*held[:at], held[at] + 1, *held[at + 1 :], 7, 7]
    whole = length // CHUNK_TOKENS * CHUNK_TOKENS
    assert common_prefix(fingerprint(held), prompt) == (at if at >= whole else at // CHUNK_TOKENS * CHUNK_TOKENS)


def test_hazard_04_a_removed_middle_is_not_proven_although_the_rest_is_the_same() -> None:
    held = [*range(64), *range(100, 164), *range(200, 264)]
    assert common_prefix(fingerprint(held), [*range(64), *range(200, 264)]) == 64


def test_a_chunk_is_proven_only_behind_the_same_chunks() -> None:
    """Digests are chained: equal chunks at equal places do not count after a difference."""
    first, second = list(range(32)), list(range(32, 64))
    assert fingerprint(second + second).digests[:16] != fingerprint(second + second).digests[16:]
    assert common_prefix(fingerprint(first + second), second + second) == 0


@given(st.lists(token_ids, max_size=100))
def test_a_sequence_is_16_bytes_per_32_tokens_and_a_tail(ids: list[int]) -> None:
    held = fingerprint(ids)
    assert held.length == len(ids)
    assert len(held.digests) == len(ids) // CHUNK_TOKENS * DIGEST_BYTES
    assert list(held.tail) == ids[len(ids) // CHUNK_TOKENS * CHUNK_TOKENS :]


def test_gateways_and_workers_of_any_version_write_the_same() -> None:
    """The plugin on D may be older than the gateway; whoever changes this has to raise the format's version."""
    assert to_json(fingerprint(range(34))) == {
        "v": 1,
        "tokens": 34,
        "chunks": "FHtehWCUDrP2v6C9gaE5YQ==",
        "tail": [32, 33],
    }


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["1"], [None]])
def test_what_is_no_token_id_cannot_be_digested(ids: list[Any]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        fingerprint(ids * CHUNK_TOKENS)


@given(st.lists(token_ids, max_size=100))
def test_a_sequence_survives_json(ids: list[int]) -> None:
    held = fingerprint(ids)
    assert from_json(json.loads(json.dumps(to_json(held)))) == held
    assert from_json(to_json(held) | {"block_size": 16}) == held


@given(st.lists(token_ids, max_size=100))
def test_a_prompt_s_end_survives_json_and_holds_what_no_digest_covers(ids: list[int]) -> None:
    end = prompt_end(ids)
    assert prompt_end_from_json(json.loads(json.dumps(prompt_end_to_json(end)))) == end
    assert end.tail == fingerprint(ids).tail


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], {}, {"tokens": 1}, {"tail": []}, {"tokens": "1", "tail": [1]}, {"tokens": True, "tail": [1]}),
        *({"tokens": 1, "tail": []}, {"tokens": 32, "tail": [1]}, {"tokens": -31, "tail": [1]}),
        *({"tokens": 1, "tail": [-1]}, {"tokens": 1, "tail": [2**32]}, {"tokens": 1, "tail": [True]}),
    ],
)
def test_an_inconsistent_prompt_end_is_none(value: Any) -> None:
    assert prompt_end_from_json(value) is None


GOOD = to_json(fingerprint(range(70)))


def changed(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


def chunks(count: int) -> str:
    return base64.b64encode(bytes(count)).decode()


@pytest.mark.parametrize(
    "value",
    [
        *[{key: GOOD[key] for key in GOOD if key != missing} for missing in GOOD],
        changed(v=0),
        changed(v=2),
        changed(v="1"),
        changed(v=1.0),
        changed(v=None),
        changed(tokens=69),
        changed(tokens=71),
        changed(tokens=38),
        changed(tokens=102),
        changed(tokens=-58),
        changed(tokens=0),
        changed(tokens="70"),
        changed(tokens=70.0),
        changed(tokens=None),
        changed(chunks=""),
        changed(chunks=chunks(31)),
        changed(chunks=chunks(33)),
        changed(chunks=chunks(48)),
        changed(chunks=GOOD["chunks"][:-1]),
        changed(chunks=GOOD["chunks"] + "="),
        changed(chunks=GOOD["chunks"] + "\n"),
        changed(chunks="?" + GOOD["chunks"][1:]),
        changed(chunks="é" + GOOD["chunks"][1:]),
        changed(chunks=None),
        changed(chunks=GOOD["chunks"].encode()),
        changed(tail=[]),
        changed(tail=GOOD["tail"][1:]),
        changed(tail=[*GOOD["tail"], 1]),
        changed(tail=[*GOOD["tail"][1:], -1]),
        changed(tail=[*GOOD["tail"][1:], 2**32]),
        changed(tail=[*GOOD["tail"][1:], 1.0]),
        changed(tail=[*GOOD["tail"][1:], True]),
        changed(tail=[*GOOD["tail"][1:], None]),
        changed(tail=[*GOOD["tail"][1:], "1"]),
        changed(tail="123456"),
        changed(tail=None),
        {"v": 1, "tokens": True, "chunks": "", "tail": [7]},
        {"v": 1, "tokens": False, "chunks": "", "tail": []},
        {"v": True, "tokens": 1, "chunks": "", "tail": [7]},
        {"v": 1, "tokens": -1, "chunks": "", "tail": [0] * 31},
        None,
        True,
        1,
        "",
        [],
        [GOOD],
        {},
    ],
)
def test_half_a_proof_is_no_proof(value: object) -> None:
    assert from_json(value) is None


def test_the_unchanged_value_is_a_proof() -> None:
    assert from_json(GOOD) == fingerprint(range(70))


scalars = st.none() | st.booleans() | st.integers(-100, 100) | st.text(max_size=5)


@given(st.sampled_from(sorted(GOOD)), scalars | st.lists(scalars, max_size=7))
def test_what_is_read_is_what_was_written(key: str, value: object) -> None:
    held = from_json(changed(**{key: value}))
    assert held is None or to_json(held) == changed(**{key: value})
