"""Editing JSON text against an obvious oracle: parse it, edit the parsed members, compare; and count every byte."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import OUR_KEYS, Pairs, json_arrays, json_objects, json_texts, keys, pairs, spaces

from extproc import splice

names = st.sets(keys, max_size=3)
changes = st.dictionaries(keys, json_texts.map(str.encode), max_size=3)


def edited_pairs(before: Pairs, drop: set[str], put: dict[str, bytes], add: dict[str, bytes]) -> Pairs:
    """What ``edit`` must mean, on parsed members."""
    kept = [(key, pairs(put[key]) if key in put else value) for key, value in before if key not in drop]
    return Pairs(kept + [(key, pairs(value)) for key, value in add.items()])


def edit(text: bytes, **how: object) -> bytes:
    start = splice.object_start(text)
    assert start is not None
    return splice.edit(text, start, splice.members(text, start), **how)  # type: ignore[arg-type]


@given(json_objects, names, changes, changes)
def test_edit_means_the_same_as_editing_the_parsed_members(
    text: str, drop: set[str], put: dict[str, bytes], add: dict[str, bytes]
) -> None:
    after = edit(text.encode(), drop=drop, put=put, add=add)
    assert pairs(after) == edited_pairs(pairs(text), drop, put, add)


@given(json_objects, names, changes)
def test_bytes_outside_the_edited_members_stay_as_they_were(text: str, drop: set[str], put: dict[str, bytes]) -> None:
    data = text.encode()
    start = splice.object_start(data)
    assert start is not None
    found = splice.members(data, start)
    after = splice.edit(data, start, found, drop=drop, put=put)

    kept = [member for member in found if member.key not in drop]
    pieces = [
        data[member.start : member.value_start] + (put.get(member.key) or data[member.value_start : member.end])
        for member in kept
    ]
    assert after.startswith(data[: start + 1])
    at = start + 1
    for number, piece in enumerate(pieces):
        found_at = after.index(piece, at)
        lead = after[at:found_at]
        assert lead.count(b",") == min(number, 1)
        assert lead in data
        at = found_at + len(piece)
    tail = data[found[-1].end if found else start + 1 :]
    assert after[at:] == tail


@given(json_objects)
def test_editing_nothing_changes_nothing(text: str) -> None:
    assert edit(text.encode()) == text.encode()


@given(json_objects)
def test_members_are_the_parsed_members_in_order_with_duplicates(text: str) -> None:
    data = text.encode()
    start = splice.object_start(data)
    assert start is not None
    found = splice.members(data, start)
    assert [(member.key, pairs(data[member.value_start : member.end])) for member in found] == list(pairs(text))
    assert [json.loads(data[member.start : member.value_start].rstrip(b" \t\r\n:")) for member in found] == [
        member.key for member in found
    ]


@given(spaces, json_arrays, spaces)
def test_elements_are_the_parsed_elements_in_order(before: str, array: str, after: str) -> None:
    data = (before + array + after).encode()
    found = [data[start:end] for start, end in splice.elements(data, len(before.encode()))]
    assert [pairs(element) for element in found] == pairs(array)
    assert all(element == element.strip(b" \t\r\n") for element in found)


@given(json_texts, spaces)
def test_only_objects_have_a_start(text: str, space: str) -> None:
    data = (space + text).encode()
    start = splice.object_start(data)
    assert (start is not None) == isinstance(pairs(text), Pairs)
    assert start in (None, len(space))


@pytest.mark.parametrize("text", [b"", b" \n", b"[]", b'"{"'])
def test_text_without_an_outermost_brace_has_no_object_start(text: bytes) -> None:
    assert splice.object_start(text) is None


@given(json_texts)
def test_a_value_is_known_by_its_first_byte(text: str) -> None:
    value = pairs(text)
    is_object = isinstance(value, Pairs)
    assert splice.is_object(text.encode(), 0) == is_object
    assert splice.is_array(text.encode(), 0) == (isinstance(value, list) and not is_object)


def test_an_object_inside_the_text_is_edited_where_it_stands() -> None:
    text = b'{"a": {"b": 1, "c": 2} , "d":[3]}'
    assert splice.edit(text, 6, splice.members(text, 6), drop={"b"}, add={"e": b"4"}) == (
        b'{"a": {"c": 2,"e":4} , "d":[3]}'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"b":1}', b"{}"),
        (b'{ "b" : 1 }', b"{ }"),
        (b'{"b":1,"c":2}', b'{"c":2}'),
        (b'{"a":0, "b":1 , "c":2}', b'{"a":0 , "c":2}'),
        (b'{"a":0,\n "b":1\n}', b'{"a":0\n}'),
        (b'{"b":1,"b":2,"a":0,"b":3}', b'{"a":0}'),
    ],
)
def test_a_dropped_member_takes_one_comma_with_it(text: bytes, expected: bytes) -> None:
    assert edit(text, drop={"b"}) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(b"{}", b'{"b":1}'), (b"{ }", b'{"b":1 }'), (b'{"a":0 }', b'{"a":0,"b":1 }')]
)
def test_an_added_member_stands_last(text: bytes, expected: bytes) -> None:
    assert edit(text, add={"b": b"1"}) == expected


@pytest.mark.parametrize("key", OUR_KEYS)
def test_hazard_34_a_key_is_found_in_every_escaped_spelling(key: str) -> None:
    spelling = "".join(f"\\u{ord(character):04X}" for character in key)
    assert edit(f'{{"a":1,"{spelling}":{{"x":[]}}}}'.encode(), drop={key}) == b'{"a":1}'


def test_hazard_34_the_text_of_a_key_inside_a_string_is_left_alone() -> None:
    text = b'{"content":"\\"kv_transfer_params\\":{\\"a\\":1}","a":["kv_transfer_params"]}'
    assert edit(text, drop={"kv_transfer_params"}) == text


def test_depth_costs_no_stack() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert edit(b'{"a":' + deep + b',"b":1}', drop={"b"}) == b'{"a":' + deep + b"}"


@pytest.mark.parametrize("wrapped", [b'{"a":%s}', b'{"a":[%s]}'])
def test_hazard_23_a_long_string_full_of_escapes_costs_no_memory(wrapped: bytes) -> None:
    """A backtracking pattern remembers every escape: 1 GiB for a request of 16 MiB, which any client may send."""
    text = wrapped % (b'"' + b"\\n" * 200_000 + b'"')
    tracemalloc.start()
    try:
        found = splice.members(text, 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(member.key, member.end) for member in found] == [("a", len(text) - 1)]
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    "text",
    [b'{"a', b'{"a":"b', b'{"a":[1,2', b'{"a":[' + b"1" * 5000, b'{"a":["' + b"1" * 5000, b'{"a":}', b'{"a":{"b":1}'],
    ids=lambda text: text[:9].decode(),
)
def test_text_that_is_not_json_is_refused_or_out_of_range_but_never_loops(text: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        splice.members(text, 0)


odd_texts = st.sampled_from(["", '"', "\\", '\\"', "\\\\", "[", "}", "\n", "é", '"]}'])
# Around the sizes at which one way of looking for an end gives over to another.
sizes = st.sampled_from([0, 1, 49, 50, 51, 199, 200, 201, 399, 400, 401, 1023, 1024, 1025, 3000, 3100, 10_000])
long_values = st.recursive(
    sizes.map(lambda size: list(range(size)))
    | sizes.map(lambda size: 10**size)
    | st.builds(lambda size, odd, at: "x" * (size - at % (size + 1)) + odd + "x" * at, sizes, odd_texts, sizes),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.sampled_from(["a", "b", '"]}']), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"]', "x" * 300]), long_values), max_size=4), spaces)
def test_members_are_found_however_long_they_are(wanted: list[tuple[str, Any]], space: str) -> None:
    text = "{" + ",".join(f"{space}{json.dumps(key)}{space}:{space}{dumps(value)}" for key, value in wanted) + "}"
    found = splice.members(text.encode(), 0)
    assert [member.key for member in found] == [key for key, _ in wanted]
    assert [text.encode()[member.value_start : member.end].decode() for member in found] == [
        dumps(value) for _, value in wanted
    ]


def dumps(value: Any) -> str:
    """Spell a value with its numbers as long as they are: Python refuses to print some of these integers."""
    if isinstance(value, int):
        return "1" + "0" * round(value.bit_length() * 0.30103)
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumps(each)}" for key, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
