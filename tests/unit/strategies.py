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

spaces = st.text(" \t\r\n", max_size=3)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


@st.composite
def spelled(draw: st.DrawFn, text: str) -> str:
    """A JSON string for ``text``: any character may be escaped, in either way."""
    spelling = json.dumps(text, ensure_ascii=draw(st.booleans()))
    if not text or not draw(st.booleans()):
        return spelling
    where = draw(st.integers(0, len(text) - 1))
    before, after = json.dumps(text[:where])[1:-1], json.dumps(text[where + 1 :])[1:-1]
    return f'"{before}{_escaped(text[where])}{after}"'


texts = st.sampled_from(TRICKY_TEXT) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
keys = st.sampled_from(OUR_KEYS) | texts
strings = texts.flatmap(spelled)
numbers = st.one_of(
    st.integers().map(str),
    st.integers(10**18, 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["-0", "1E+5", "0.10", "1e-7", "18446744073709551616", "3.141592653589793238462643383279"]),
)
scalars = st.one_of(strings, numbers, st.sampled_from(["true", "false", "null"]))


@st.composite
def spelled_objects(draw: st.DrawFn, values: st.SearchStrategy[str], names: st.SearchStrategy[str] = keys) -> str:
    """A JSON object with odd spacing, duplicate keys and escaped key spellings."""
    pairs = draw(st.lists(st.tuples(names.flatmap(spelled), values), max_size=5))
    space = [draw(spaces) for _ in range(4)]
    members = [f"{key}{space[0]}:{space[1]}{value}" for key, value in pairs]
    return "{" + space[2] + f"{space[0]},{space[3]}".join(members) + space[1] + "}"


@st.composite
def spelled_arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    """A JSON array with odd spacing."""
    space = [draw(spaces) for _ in range(3)]
    return "[" + space[0] + f"{space[1]},{space[2]}".join(draw(st.lists(values, max_size=5))) + space[1] + "]"


json_texts = st.recursive(scalars, lambda inner: spelled_objects(inner) | spelled_arrays(inner), max_leaves=12)
json_objects = st.builds("{}{}{}".format, spaces, spelled_objects(json_texts), spaces)
json_arrays = spelled_arrays(json_texts)

token_ids = st.integers(0, 2**32 - 1)


class Pairs(list[Any]):
    """An object as its members in order, duplicates included, which a dict would lose."""


def pairs(text: str | bytes) -> Any:
    """Parse JSON with the standard library, keeping duplicates, order and the spelling of numbers."""
    return json.loads(text, object_pairs_hook=Pairs, parse_int=_Number, parse_float=_Number)


class _Number(str):
    """A number as it was spelled; ``pairs`` must not call two spellings of one number equal."""

    __slots__ = ()
