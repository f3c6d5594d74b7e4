"""Handles: what is accepted, and that every byte but the cut ones goes to P as D wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import json_objects, json_texts, keys, objects_of, pairs, spelled

from extproc import proof
from extproc.handle import (
    COLD_PREFILL,
    DECODE_ALONE,
    Handle,
    HandleRefused,
    attach_cut,
    attach_whole,
    blocks_cover_tokens,
    cached_tokens,
    has_countable_blocks,
    is_for_decode,
    read_publication,
    release_params,
    with_prompt_ids,
)

PUBLISHED: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "8b88bf27-8cc6-49d6-9401-46df614000ff",
    "remote_request_id": "chatcmpl-a397ba302b3a2119",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 70,
    "remote_blocks_expiry_time": 12345.678901234,
    "transfer_mode": "pull",
    "remote_registration_generation": None,
}
RAW = json.dumps(PUBLISHED).encode()


def handle(**changes: Any) -> Handle:
    return read_publication(json.dumps(PUBLISHED | changes).encode()).handle


def test_a_handle_is_read() -> None:
    assert read_publication(RAW).handle == Handle(
        raw=RAW,
        engine_id="8b88bf27-8cc6-49d6-9401-46df614000ff",
        host="10.0.0.7",
        port=5600,
        tokens=70,
        blocks_per_group=(3,),
        tokens_per_block_may_vary=False,
    )


def test_a_stock_handle_says_nothing_of_its_tokens() -> None:
    publication = read_publication(RAW)
    assert publication.sequence is None
    assert publication.block_size_tokens is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_remote_decode": False}, "not_for_prefill"),
        ({"do_remote_decode": 1}, "not_for_prefill"),
        ({"do_remote_decode": None}, "not_for_prefill"),
        ({"do_remote_prefill": True}, "not_for_prefill"),
        ({"do_remote_prefill": None}, "not_for_prefill"),
        ({"transfer_mode": "push"}, "push_mode"),
        ({"transfer_mode": None}, "push_mode"),
        ({"remote_block_ids": None}, "incomplete"),
        ({"remote_block_ids": []}, "incomplete"),
        ({"remote_block_ids": {}}, "incomplete"),
        ({"remote_block_ids": [1, 2]}, "incomplete"),
        ({"remote_block_ids": [[1], None]}, "incomplete"),
        ({"remote_engine_id": ""}, "incomplete"),
        ({"remote_engine_id": 7}, "incomplete"),
        ({"remote_request_id": None}, "incomplete"),
        ({"remote_host": None}, "incomplete"),
        ({"remote_port": "5600"}, "incomplete"),
        ({"remote_num_tokens": None}, "incomplete"),
        ({"remote_num_tokens": 70.0}, "incomplete"),
        ({"remote_num_tokens": 0}, "empty"),
        ({"remote_num_tokens": -1}, "empty"),
        ({"remote_block_ids": [[]]}, "empty"),
        ({"remote_block_ids": [[], []]}, "empty"),
    ],
)
def test_what_p_could_not_read_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(HandleRefused) as refused:
        handle(**changes)
    assert refused.value.reason == reason


@pytest.mark.parametrize("missing", sorted(set(PUBLISHED) - {"transfer_mode", "dcp_size", "tp_size", "pp_size"}))
def test_a_handle_without_a_key_p_needs_is_refused(missing: str) -> None:
    raw = json.dumps({key: value for key, value in PUBLISHED.items() if key != missing}).encode()
    optional = missing in ("remote_blocks_expiry_time", "remote_registration_generation")
    if optional:
        assert read_publication(raw).handle.raw == raw
    else:
        with pytest.raises(HandleRefused):
            read_publication(raw)


def test_one_token_in_one_group_is_enough_to_keep() -> None:
    kept = handle(remote_num_tokens=1, remote_block_ids=[[7], []])
    assert (kept.tokens, kept.blocks_per_group) == (1, (1, 0))


def test_without_a_context_parallel_size_one_is_meant() -> None:
    raw = json.dumps({key: value for key, value in PUBLISHED.items() if key != "dcp_size"}).encode()
    assert read_publication(raw).handle.tokens_per_block_may_vary is False


def test_without_a_transfer_mode_pull_is_meant() -> None:
    """Workers before vLLM 0.32 know no other."""
    raw = json.dumps({key: value for key, value in PUBLISHED.items() if key != "transfer_mode"}).encode()
    assert read_publication(raw).handle.tokens == 70


@pytest.mark.parametrize("raw", [b"[]", b"null", b"1", b'"text"'])
def test_transfer_parameters_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(HandleRefused) as refused:
        read_publication(raw)
    assert refused.value.reason == "not_an_object"


@given(json_texts, st.sampled_from(sorted(PUBLISHED)))
def test_any_json_is_a_handle_or_refused(value: str, key: str) -> None:
    for raw in (value, json.dumps({**PUBLISHED, key: None}).replace(f'"{key}": null', f'"{key}": {value}')):
        try:
            publication = read_publication(raw.encode())
        except HandleRefused as refused:
            assert refused.reason  # noqa: PT017 - either way something is asserted
        else:
            assert publication.handle.raw == raw.encode()


# --- the digest -----------------------------------------------------------------------------------------------------

SEQUENCE = proof.fingerprint(range(70))


@pytest.mark.parametrize("block_size", [1, 32])
@pytest.mark.parametrize("name", ["kvloop_digest", "kvloop\\u005fdigest"])
def test_the_digest_is_read_and_never_reaches_p(name: str, block_size: int) -> None:
    digest = json.dumps(proof.to_json(SEQUENCE) | {"block_size": block_size})
    raw = RAW[:-1] + f', "{name}": {digest}}}'.encode()
    publication = read_publication(raw)
    assert publication.handle.raw == RAW
    assert publication.sequence == SEQUENCE
    assert publication.block_size_tokens == block_size


def test_a_digest_of_null_never_reaches_p_either() -> None:
    publication = read_publication(RAW[:-1] + b', "kvloop_digest": null}')
    assert publication.handle.raw == RAW
    assert publication.sequence is None


@pytest.mark.parametrize("digest", ["7", "[]", '"v1"', "{}", '{"v":1}'])
def test_a_broken_digest_proves_nothing_and_harms_nothing(digest: str) -> None:
    publication = read_publication(RAW[:-1] + f', "kvloop_digest": {digest}}}'.encode())
    assert publication.handle.raw == RAW
    assert publication.sequence is None
    assert publication.block_size_tokens is None


@pytest.mark.parametrize("block_size", [0, -16, 16.0, "16", True, None])
def test_a_block_size_that_is_none_is_unknown(block_size: Any) -> None:
    digest = json.dumps(proof.to_json(SEQUENCE) | {"block_size": block_size})
    publication = read_publication(RAW[:-1] + f', "kvloop_digest": {digest}}}'.encode())
    assert publication.sequence == SEQUENCE
    assert publication.block_size_tokens is None


# --- what goes to P -------------------------------------------------------------------------------------------------

odd_handles = st.builds(
    lambda odd, position: (odd, position),
    objects_of(st.tuples(spelled(keys.filter(lambda key: key not in PUBLISHED)), json_texts)),
    st.booleans(),
)


def merged(odd: str, *, first: bool) -> bytes:
    """A handle with unknown keys of any spelling before or behind its own."""
    inner = odd.strip(" \t\r\n")[1:-1]
    own = RAW.decode()[1:-1]
    halves = [inner, own] if first else [own, inner]
    return ("{" + ",".join(half for half in halves if half.strip(" \t\r\n")) + "}").encode()


@given(odd_handles, st.integers(1, 3), st.sampled_from([1, 16, 32]))
def test_hazard_44_every_key_goes_through_byte_for_byte_but_the_two_that_are_cut(
    odd: tuple[str, bool], blocks: int, block_size: int
) -> None:
    raw = merged(odd[0], first=odd[1])
    whole = read_publication(raw).handle
    assert attach_whole(whole) == raw
    expected = raw.replace(b"[[1, 2, 3]]", json.dumps([[1, 2, 3][:blocks]], separators=(",", ":")).encode())
    expected = expected.replace(b'tokens": 70', f'tokens": {blocks * block_size}'.encode())
    assert attach_cut(whole, blocks, block_size) == expected
    assert release_params(whole) == raw.replace(b'tokens": 70', b'tokens": 0')
    assert b"12345.678901234" in release_params(whole)


def test_a_release_claims_no_tokens_and_keeps_every_block() -> None:
    released = json.loads(release_params(handle()))
    assert released == PUBLISHED | {"remote_num_tokens": 0}


def test_a_cut_keeps_the_first_blocks() -> None:
    """P trims from the end of what it is given, so the end must already be gone."""
    cut = json.loads(attach_cut(handle(), 2, 32))
    assert cut == PUBLISHED | {"remote_block_ids": [[1, 2]], "remote_num_tokens": 64}


@pytest.mark.parametrize(
    ("changes", "countable"),
    [
        ({}, True),
        ({"dcp_size": None}, True),
        ({"dcp_size": 2}, False),
        ({"remote_block_ids": [[1, 2, 3], [4, 5, 6]]}, False),
    ],
)
def test_blocks_are_countable_in_one_group_without_context_parallelism(
    changes: dict[str, Any], countable: bool
) -> None:
    assert has_countable_blocks(handle(**changes)) is countable


@pytest.mark.parametrize(
    ("changes", "block_size", "covered"),
    [
        ({}, 32, True),
        ({}, 16, False),
        ({}, 64, False),
        ({"remote_block_ids": [[1, 2, 3, 4]]}, 32, False),
        ({"remote_num_tokens": 96}, 32, True),
        ({"remote_num_tokens": 97}, 32, False),
    ],
)
def test_a_handle_must_list_the_blocks_its_tokens_need_and_no_other(
    changes: dict[str, Any], block_size: int, covered: bool
) -> None:
    assert blocks_cover_tokens(handle(**changes), block_size) is covered


@pytest.mark.parametrize("params", [COLD_PREFILL, DECODE_ALONE, RAW, b"{}", b'{"prompt_token_ids":[9],"a":1}'])
def test_prompt_ids_are_added_once(params: bytes) -> None:
    expected = json.loads(params) | {"prompt_token_ids": [1, 2]}
    with_ids = with_prompt_ids(params, b"[1,2]")
    assert json.loads(with_ids) == expected
    assert with_ids.count(b"prompt_token_ids") == 1


@given(json_objects)
def test_adding_prompt_ids_leaves_the_other_parameters(text: str) -> None:
    others = [pair for pair in pairs(text) if pair[0] != "prompt_token_ids"]
    assert pairs(with_prompt_ids(text.encode(), b"[1]")) == [*others, ("prompt_token_ids", ["1"])]


def test_a_cold_prefill_and_a_lone_decode_ask_nobody_for_kv() -> None:
    assert json.loads(COLD_PREFILL) == {"do_remote_decode": True, "do_remote_prefill": False}
    assert json.loads(DECODE_ALONE) == {"do_remote_decode": False, "do_remote_prefill": False}


# --- where D is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LocalHost",
        "localhost.",
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "::1",
        "[::1]",
        "::1%lo",
        "::",
        "::ffff:127.0.0.1",
        "::ffff:0.0.0.0",
    ],
)
def test_hazard_41_an_address_that_means_this_machine_is_loopback(host: str) -> None:
    assert handle(remote_host=host).is_loopback is True


@pytest.mark.parametrize("host", ["10.0.0.7", "decode-0.decode", "localhost.example", "fe80::1", "::ffff:10.0.0.7"])
def test_hazard_41_any_other_address_is_not(host: str) -> None:
    assert handle(remote_host=host).is_loopback is False


def test_hazard_42_two_ranks_of_one_host_are_two_engines() -> None:
    first, second = handle(remote_engine_id="a", remote_port=5600), handle(remote_engine_id="b", remote_port=5601)
    assert (first.engine_id, first.port) == ("a", 5600)
    assert (second.engine_id, second.port) == ("b", 5601)


# --- P's answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"do_remote_prefill": True}, True),
        ({"do_remote_prefill": False}, False),
        ({"do_remote_prefill": 1}, False),
        ({}, False),
        (None, False),
        ([], False),
        ("text", False),
    ],
)
def test_only_an_answer_with_kv_to_read_is_for_decode(params: object, *, expected: bool) -> None:
    assert is_for_decode(params) is expected


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (700, 700), (None, None), (True, None), (1.0, None)])
def test_p_says_how_many_tokens_it_did_not_compute(value: object, expected: int | None) -> None:
    assert cached_tokens({"remote_prefill_cached_tokens": value}) == expected


def test_p_may_say_nothing_of_cached_tokens() -> None:
    assert cached_tokens({}) is None
