"""Inputs that parsers must survive: JSON spelled in every way the grammar allows, token ids, headers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

OUR_KEYS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "prompt_token_ids", "stream")

TRICKY_TEXT = (
    "",
    '"kv_transfer_params": {"a": 1}',
    '{"kv_transfer_params":null}',
    "\\",
    '\\"',
    "]}",
    "[{",
    ",",
    "\n\r\t\b\f/",
    "\u2028\x7f\x00",
    "Ž🧊",
)

spaces = st.sampled_from(["", "", " ", "\n", "\t\r\n "])
spacings = st.tuples(spaces, spaces, spaces, spaces)


def _spell(text: str, how: int) -> str:
    """Spell a JSON string in one of several ways: as it is, in ASCII, or with one character escaped that need not be."""
    spelling = json.dumps(text, ensure_ascii=how % 2 == 0)
    if how < 2 or not text:
        return spelling
    where = how % len(text)
    units = text[where].encode("utf-16-be").hex()
    escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    before, after = json.dumps(text[:where])[1:-1], json.dumps(text[where + 1 :])[1:-1]
    return f'"{before}{escaped}{after}"'


def spelled(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON strings for these texts, in any spelling."""
    return st.builds(_spell, texts, st.integers(0, 20))


texts = st.sampled_from(TRICKY_TEXT) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
keys = st.sampled_from(OUR_KEYS) | st.sampled_from(OUR_KEYS) | texts
numbers = st.one_of(
    st.integers().map(str),
    st.integers(10**18, 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["-0", "1E+5", "0.10", "1e-7", "18446744073709551616", "3.141592653589793238462643383279"]),
)
scalars = st.one_of(spelled(texts), numbers, st.sampled_from(["true", "false", "null"]))


def _object(pairs: list[tuple[str, str]], space: tuple[str, str, str, str]) -> str:
    members = [f"{key}{space[0]}:{space[1]}{value}" for key, value in pairs]
    return "{" + space[2] + f"{space[3]},{space[0]}".join(members) + space[1] + "}"


def _array(elements: list[str], space: tuple[str, str, str, str]) -> str:
    return "[" + space[0] + f"{space[1]},{space[2]}".join(elements) + space[3] + "]"


def objects_of(*members: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[str]:
    """JSON objects of such members (spelled key, value), with odd spacing and duplicates."""
    return st.builds(_object, st.lists(st.one_of(*members), max_size=5), spacings)


def arrays_of(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON arrays of such values, with odd spacing."""
    return st.builds(_array, st.lists(values, max_size=5), spacings)


json_texts = st.recursive(
    scalars, lambda inner: objects_of(st.tuples(spelled(keys), inner)) | arrays_of(inner), max_leaves=6
)
json_objects = st.builds("{}{}{}".format, spaces, objects_of(st.tuples(spelled(keys), json_texts)), spaces)
json_arrays = arrays_of(json_texts)

token_ids = st.integers(0, 2**32 - 1)


class Pairs(list[Any]):
    """An object as its members in order, duplicates included, which a dict would lose."""


def pairs(text: str | bytes) -> Any:
    """Parse JSON with the standard library, keeping duplicates, order and the spelling of numbers."""
    return json.loads(text, object_pairs_hook=Pairs, parse_int=_Number, parse_float=_Number)


class _Number(str):
    """A number as it was spelled; ``pairs`` must not call two spellings of one number equal."""

    __slots__ = ()
