"""What is written for other processes is read back as it was, and nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import handle_params

from extproc import proof
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.store import StoredTurn
from extproc.store_format import StoreFormat, Unreadable

KEY, OTHER_KEY = ConversationKey(b"k" * 16), ConversationKey(b"o" * 16)
SPELLING = StoreFormat(b"secret", "run-1")

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def turn(ids: Ids[int], *, block_size: int | None = 32, model: str = "m", **params: Any) -> StoredTurn:
    raw = orjson.dumps(handle_params(max(1, len(ids)), **params))
    return StoredTurn(read_publication(raw).handle, proof.fingerprint(ids), block_size, model, 12.5)


turns = st.builds(
    turn,
    tokens,
    block_size=st.none() | st.integers(1, 2**32 - 1),
    model=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    remote_host=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
keys = st.builds(ConversationKey, st.binary(min_size=16, max_size=16))


@given(turns, keys, st.integers(0, 2**53), st.binary(max_size=80), st.text("0123456789abcdef"))
def test_a_turn_is_read_as_it_was_written(
    kept: StoredTurn, key: ConversationKey, deadline_ms: int, secret: bytes, run_id: str
) -> None:
    spelling = StoreFormat(secret, run_id)
    read = spelling.decode(key, spelling.encode(key, kept, deadline_ms))
    assert isinstance(read, StoredTurn)
    assert (read.handle, read.sequence) == (kept.handle, kept.sequence)
    assert (read.block_size_tokens, read.model, read.deadline) == (
        kept.block_size_tokens,
        kept.model,
        deadline_ms / 1000,
    )


@given(st.binary(max_size=200))
def test_a_foreign_value_is_not_read(value: bytes) -> None:
    assert SPELLING.decode(KEY, value) == Unreadable("foreign")


@given(turns, st.data())
def test_a_value_with_any_byte_changed_or_missing_is_not_read(kept: StoredTurn, data: st.DataObject) -> None:
    value = SPELLING.encode(KEY, kept, 1)
    at = data.draw(st.integers(0, len(value) - 1))
    changed = value[:at] + bytes([value[at] ^ data.draw(st.integers(1, 255))]) + value[at + 1 :]
    assert isinstance(SPELLING.decode(KEY, changed), Unreadable)
    assert isinstance(SPELLING.decode(KEY, value[:at]), Unreadable)
    assert isinstance(SPELLING.decode(KEY, value + b"x"), Unreadable)


def test_a_newer_versions_value_is_not_read() -> None:
    value = SPELLING.encode(KEY, turn([1]), 1)
    assert SPELLING.decode(KEY, value[:4] + b"\x02" + value[5:]) == Unreadable("other_version")


@pytest.mark.parametrize(
    "reader", [StoreFormat(b"other", "run-1"), StoreFormat(b"", "run-1")], ids=["another", "none at all"]
)
def test_a_value_written_with_another_secret_is_not_read(reader: StoreFormat) -> None:
    assert reader.decode(KEY, SPELLING.encode(KEY, turn([1]), 1)) == Unreadable("damaged")


def test_a_value_copied_to_another_conversation_is_not_read() -> None:
    assert SPELLING.decode(OTHER_KEY, SPELLING.encode(KEY, turn([1]), 1)) == Unreadable("damaged")


@given(st.binary(max_size=200), st.data())
def test_a_rightly_sealed_value_is_still_checked(body: bytes, data: st.DataObject) -> None:
    """Without a secret anybody can seal: whatever is inside, nothing raises, and no half turn comes out."""
    if data.draw(st.booleans()):
        whole = SPELLING.encode(KEY, turn(range(40)), 1)[21:]
        at = data.draw(st.integers(0, len(whole)))
        body = whole[:at] + body + whole[at + data.draw(st.integers(0, 20)) :]
    read = SPELLING.decode(KEY, b"KVLT\x01" + SPELLING._seal(KEY, body) + body)
    if isinstance(read, StoredTurn):
        assert len(read.sequence.digests) == read.sequence.length // 32 * 16
        assert read.handle.tokens > 0


@pytest.mark.parametrize("raw", [b"{}", b"[]", b"{", b"\xff", b'{"do_remote_decode":true}'])
def test_a_sealed_value_without_a_handle_is_not_read(raw: bytes) -> None:
    kept = turn([1])
    value = SPELLING.encode(KEY, kept, 1)[21:].replace(kept.handle.raw, raw)
    body = value[:20] + value[20:24] + len(raw).to_bytes(4, "big") + value[28:]
    assert SPELLING.decode(KEY, b"KVLT\x01" + SPELLING._seal(KEY, body) + body) == Unreadable("damaged")


def test_names_are_keyed_hashes() -> None:
    handle = turn([1], remote_host="10.9.8.7").handle
    spellings = [SPELLING, StoreFormat(b"other", "run-1"), StoreFormat(b"secret", "run-2")]
    assert len({spelling.turn_name(KEY) for spelling in spellings}) == 3
    assert len({spelling.engine_name(handle) for spelling in spellings}) == 3
    assert len({spelling.engine_mark(handle) for spelling in spellings}) == 3
    assert "10.9.8.7" not in SPELLING.engine_name(handle)
    assert KEY.digest.hex() not in SPELLING.turn_name(KEY)
    assert SPELLING.turn_name(KEY) != SPELLING.turn_name(OTHER_KEY)
