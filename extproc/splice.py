r"""Cut members out of JSON text, or put some in, leaving every other byte as it was.

Parsing and re-serialising would change what clients and workers see: number spelling, escapes, key order, duplicate keys.
So kvloop edits the text. Every function here expects *valid* JSON (check it with a real parser first); given that, a quote
can only open a key or a string, which is what makes the two regular expressions below sufficient.

All offsets are bytes. Nothing recurses, so depth costs nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

# Possessive (``*+``) on purpose: a pattern that may backtrack remembers every escape, at 100 bytes each.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

# What is short goes by in few regular expression steps; what is long (block ids, digests, prompts) by ``bytes.find``, which
# is ten times faster per byte.
_SPACE_TEXT: Final = rb"[ \t\r\n]*+"
_SHORT_STRING_TEXT: Final = rb'"[^"\\]{0,200}+"'
_NEAR_BRACKET: Final = re.compile(rb'(?:[^"\[{\]}]{1,50}+|' + _SHORT_STRING_TEXT + rb"){0,8}+([\[{\]}])?")
"""Up to and with the next bracket outside strings (group 1), if it is near."""

_MEMBER: Final = re.compile(
    rb"%(space)b(%(string)b)%(space)b:%(space)b(?:([^][{},\"\s]++|%(short)b)%(space)b(,)?)?"
    % {b"space": _SPACE_TEXT, b"string": _STRING.pattern, b"short": _SHORT_STRING_TEXT},
    re.DOTALL,
)
"""A member, in groups: its key, its value if that is short and simple, and a comma after it."""

_MARKS: Final = (b'"', b"[", b"]", b"{", b"}")
_FIRST_WINDOW_BYTES: Final = 1024

_SCALAR: Final = re.compile(rb"[^,\]}\s]+")
_SPACE: Final = re.compile(_SPACE_TEXT)
_QUOTE, _COMMA, _OPEN_BRACE, _CLOSE_BRACE, _OPEN_BRACKET = b'",{}['


class Member(NamedTuple):
    """One ``"key": value`` of an object: offsets of the key's first quote and of the value, end exclusive."""

    key: str
    start: int
    value_start: int
    end: int


def object_start(data: bytes) -> int | None:
    """Return the offset of the outermost ``{``, or None when the text is not an object."""
    start = _skip_space(data, 0)
    return start if start < len(data) and data[start] == _OPEN_BRACE else None


def members(data: bytes, start: int) -> list[Member]:
    """List the members of the object whose ``{`` stands at ``start``, duplicates included, in order."""
    return list(iterate_members(data, start))


def has_more_members(data: bytes, limit: int) -> bool:
    """Tell whether the outermost object has more members than ``limit``; looks at no more of them than that."""
    start = object_start(data)
    return start is not None and any(number >= limit for number, _ in enumerate(iterate_members(data, start)))


def iterate_members(data: bytes, start: int) -> Iterator[Member]:
    """Yield what ``members`` lists."""
    at = start + 1
    while (match := _MEMBER.match(data, at)) is not None:
        key_start, key_end = match.span(1)
        key = data[key_start:key_end]
        name = orjson.loads(key) if b"\\" in key else key[1:-1].decode()
        value_start, end = match.span(2)
        if end < 0:
            value_start = match.end()
            end = _end_of_value(data, value_start)
        yield Member(name, key_start, value_start, end)
        if match[3]:
            at = match.end()
            continue
        comma = _skip_space(data, end)
        if data[comma] != _COMMA:
            return
        at = comma + 1
    if data[_skip_space(data, at)] != _CLOSE_BRACE:
        raise ValueError("not valid JSON")


def last(found: list[Member], key: str) -> Member:
    """Return the member of that name that counts to parsers: the last one. There must be one."""
    return next(member for member in reversed(found) if member.key == key)


def raw_value(data: bytes, key: str) -> bytes:
    """Return the text of the outermost object's member ``key``, as parsers read it: the last one counts.

    The text must be an object that has such a member.
    """
    start = object_start(data)
    assert start is not None  # noqa: S101 - the caller parsed it to a dict
    member = last(members(data, start), key)
    return data[member.value_start : member.end]


def elements(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each element of the array whose ``[`` stands at ``start``."""
    at = _skip_space(data, start + 1)
    while data[at] != b"]"[0]:
        end = _end_of_value(data, at)
        yield at, end
        at = _skip_space(data, end)
        if data[at] != _COMMA:
            return
        at = _skip_space(data, at + 1)


def is_object(data: bytes, value_start: int) -> bool:
    """Tell whether the value at this offset is an object."""
    return data[value_start] == _OPEN_BRACE


def is_array(data: bytes, value_start: int) -> bool:
    """Tell whether the value at this offset is an array."""
    return data[value_start] == _OPEN_BRACKET


def edit(
    data: bytes,
    start: int,
    found: list[Member],
    *,
    drop: Collection[str] = (),
    put: Mapping[str, bytes] | None = None,
    add: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return the text with the object at ``start`` changed, given its ``members``.

    ``drop`` removes every member of that name; ``put`` replaces the value of every member of that name where it stands;
    ``add`` appends members at the end (drop the name as well if it may be there). Values are JSON text.
    """
    put = put or {}
    out = [data[: start + 1]]
    previous_end = start + 1
    kept = 0
    for member in found:
        if member.key not in drop:
            # The first member kept takes over the spacing after the brace, the others bring their own comma.
            lead = data[previous_end : member.start] if kept else data[start + 1 : found[0].start]
            value = put.get(member.key)
            whole = (
                data[member.start : member.end] if value is None else data[member.start : member.value_start] + value
            )
            out += (lead, whole)
            kept += 1
        previous_end = member.end
    for key, value in (add or {}).items():
        out += (b"," if kept else b"", orjson.dumps(key), b":", value)
        kept += 1
    out.append(data[previous_end:])
    return b"".join(out)


def _skip_space(data: bytes, at: int) -> int:
    match = _SPACE.match(data, at)
    assert match is not None  # noqa: S101 - the pattern matches the empty string
    return match.end()


def _end_of_string(data: bytes, at: int) -> int:
    quote = data.find(b'"', at + 1)
    if quote >= 0 and data.find(b"\\", at + 1, quote) < 0:
        return quote + 1
    match = _STRING.match(data, at)
    if match is None:
        raise ValueError("not valid JSON")
    return match.end()


def _end_of_value(data: bytes, at: int) -> int:
    first = data[at]
    if first == _QUOTE:
        return _end_of_string(data, at)
    if first in (_OPEN_BRACE, _OPEN_BRACKET):
        return _end_of_container(data, at)
    match = _SCALAR.match(data, at)
    if match is None:
        raise ValueError("not valid JSON")
    return match.end()


def _end_of_container(data: bytes, at: int) -> int:
    depth = 0
    while True:
        match = _NEAR_BRACKET.match(data, at)
        assert match is not None  # noqa: S101 - the pattern matches the empty string
        at = match.end()
        if match[1] is None:
            at = _end_of_string(data, at) if data[at] == _QUOTE else _next_mark(data, at)
        elif match[1] in b"[{":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return at


def _next_mark(data: bytes, at: int) -> int:
    """Return the offset of the next quote or bracket; raises ``ValueError`` if there is none.

    Looked for in windows of growing size: a mark that is far must not be looked for again and again.
    """
    window = _FIRST_WINDOW_BYTES
    while at < len(data):
        end = at + window
        nearest = end
        for mark in _MARKS:
            found = data.find(mark, at, nearest)
            nearest = nearest if found < 0 else found
        if nearest < end:
            return nearest
        at, window = end, 2 * window
    raise ValueError("not valid JSON")
