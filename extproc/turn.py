"""Fold D's response into what is worth knowing of it, and give the client the bytes it would have got without kvloop.

Two things are read off: the handle D publishes in its last message, and (from a D without our plugin) the token ids kvloop
asked for. Both are hidden again. vLLM writes ``null`` for what nobody asked for, so ``null`` is what clients get.

Rules that must stay true:

* However a response is cut into chunks, the outcome and the client's bytes are the same.
* What cannot be parsed is forwarded as it came.
* A whole event leaves as soon as its last byte is here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from extproc import splice
from extproc.sse import EventSplitter, event_data, replace_data

if TYPE_CHECKING:
    from collections.abc import Callable

_TRANSFER_KEY: Final = "kv_transfer_params"
_PROMPT_IDS_KEY: Final = "prompt_token_ids"
_IDS_KEY: Final = "token_ids"

# Cheap tests for "may hold something of ours". An escape (\\u) may spell a key in disguise, so it counts as a hit.
_TRANSFER_WORD: Final = b"kv_transfer_params"
_ANY_IDS_WORD: Final = b"token_ids"
_ESCAPE: Final = b"\\u"
_IDS_WORD: Final = b'"token_ids"'
_IDS_MEMBER: Final = re.compile(rb'"token_ids":(\[[0-9,]*\])')
_NULL_TRANSFER: Final = b'"kv_transfer_params":null'


class ResponseTooLarge(Exception):
    """A response kvloop must hold to strip it outgrew the configured bound."""


def hide(_: bytes) -> None:
    """Show a client no transfer parameters."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What to read off one response. ``hide_token_ids`` is set when kvloop asked for the ids and the client did not."""

    learn_token_ids: bool
    hide_token_ids: bool
    event_max_bytes: int
    response_max_bytes: int
    show_params: Callable[[bytes], bytes | None] = hide
    """Given transfer parameters (JSON text), what the reader gets in their place; None: as if there were none."""


@dataclass(slots=True)
class Learned:
    """What a response has told so far. ``published`` is D's transfer parameters as JSON text."""

    prompt_ids: list[int] | None = None
    generated_ids: list[int] = field(default_factory=list)
    published: bytes | None = None
    null_transfer_seen: bool = False


class TurnFold(Protocol):
    """A response being folded, whatever its media type."""

    learned: Learned

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes of the response are held back until more of it arrives."""

    def feed(self, data: bytes, *, end: bool) -> bytes | None:
        """Take a chunk; return the bytes that replace it for the client, None if it goes as it came."""


class StreamedTurn:
    """Fold a ``text/event-stream`` response."""

    def __init__(self, watch: Watch) -> None:
        self.learned = Learned()
        self._watch = watch
        self._splitter = EventSplitter(watch.event_max_bytes)

    @property
    def holds_bytes(self) -> bool:
        """See ``TurnFold``."""
        return self._splitter.holds_bytes

    def feed(self, data: bytes, *, end: bool) -> bytes | None:
        """Take a chunk, see ``TurnFold``; raises ``EventTooLarge``."""
        splitter = self._splitter
        if not splitter.holds_bytes and data.endswith(b"\n\n") and self._is_plain(data):
            return None
        # Mostly one chunk is one event; then there is nothing to cut.
        is_one_event = not splitter.holds_bytes and data.endswith(b"\n\n") and _is_one_event(data)
        events = [data] if is_one_event else splitter.feed(data)
        if end:
            events.append(splitter.flush())
        out = b"".join(map(self._client_event, events))
        return None if out == data else out

    def _is_plain(self, data: bytes) -> bool:
        """Whether these whole events hold nothing of ours; ``null`` in every chunk (vLLM 0.33) is nothing, too."""
        if not self._may_hold_ours(data):
            return True
        if self._watch.learn_token_ids or _ESCAPE in data:
            return False
        # As many nulls as words in all of them is as many in each: one answer for them together and one by one.
        if data.count(_TRANSFER_WORD) != data.count(_NULL_TRANSFER):
            return False
        self.learned.null_transfer_seen = True
        return True

    def _may_hold_ours(self, data: bytes) -> bool:
        return _TRANSFER_WORD in data or _ESCAPE in data or (self._watch.learn_token_ids and _ANY_IDS_WORD in data)

    def _client_event(self, event: bytes) -> bytes:
        if self._is_plain(event):
            return event
        simple = self._without_ids(event)
        if simple is not None:
            return simple
        data = event_data(event)
        cleaned = _take_out(data, self._watch, self.learned, keep_null=self.learned.null_transfer_seen)
        if cleaned is None:
            return b""
        return event if cleaned == data else replace_data(event, cleaned)

    def _without_ids(self, event: bytes) -> bytes | None:
        """Do for the usual chunk of a stock D, one token and its id, what ``_take_out`` does for all; None if it is not one.

        Without a backslash every quote opens or closes a string, so ``"token_ids":[`` can only be a key with its value; and
        if it stands there once, and the one choice has ids, it is that choice's.
        """
        if not self._watch.hide_token_ids or b"\\" in event or event.count(_IDS_WORD) != 1:
            return None
        found = _IDS_MEMBER.search(event)
        if found is None or not event.startswith(b"data: {") or event.find(b"\n") != len(event) - 2:
            return None
        try:
            message = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            return None
        ids = _only_ids(message)
        if ids is None:
            return None
        self.learned.null_transfer_seen |= _TRANSFER_KEY in message
        self.learned.generated_ids += ids
        if _exists_only_for_its_ids(message):
            return b""
        return event[: found.start(1)] + b"null" + event[found.end(1) :]


def _only_ids(message: dict[str, Any]) -> list[int] | None:
    """Return the token ids of the only choice, None if there are several or anything else to learn or hide."""
    choices = message.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    ids = choices[0].get(_IDS_KEY)
    others = (message.get(_TRANSFER_KEY), message.get(_PROMPT_IDS_KEY), choices[0].get(_PROMPT_IDS_KEY))
    return ids if isinstance(ids, list) and others == (None, None, None) else None


def _is_one_event(data: bytes) -> bool:
    """Tell whether text that ends in an empty line holds no other."""
    return b"\r" not in data and data.find(b"\n\n") == len(data) - 2


class WholeTurn:
    """Fold an ``application/json`` response: nothing leaves before its end, because only then it can be stripped."""

    def __init__(self, watch: Watch) -> None:
        self.learned = Learned()
        self._watch = watch
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def holds_bytes(self) -> bool:
        """See ``TurnFold``."""
        return self._size > 0

    def feed(self, data: bytes, *, end: bool) -> bytes | None:
        """Take a chunk, see ``TurnFold``; raises ``ResponseTooLarge``."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > self._watch.response_max_bytes:
            raise ResponseTooLarge
        if not end:
            return b""
        whole = b"".join(self._pieces)
        cleaned = _take_out(whole, self._watch, self.learned, keep_null=True)
        return whole if cleaned is None else cleaned


def _take_out(text: bytes, watch: Watch, learned: Learned, *, keep_null: bool) -> bytes | None:
    """Read one message, and return its text without what the client did not ask for (None: drop the message)."""
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(message, dict):
        return text
    start = splice.object_start(text)
    assert start is not None  # noqa: S101 - the text parsed to a dict
    found = splice.members(text, start)
    _learn(message, text, found, learned)
    if watch.hide_token_ids and _exists_only_for_its_ids(message):
        return None
    put, drop = _hidden(text, found, message, watch, keep_null=keep_null)
    return splice.edit(text, start, found, drop=drop, put=put) if put or drop else text


def _learn(message: dict[str, Any], text: bytes, found: list[splice.Member], learned: Learned) -> None:
    if isinstance(message.get(_TRANSFER_KEY), dict):
        at = splice.last(found, _TRANSFER_KEY)
        learned.published = text[at.value_start : at.end]
    elif _TRANSFER_KEY in message:
        learned.null_transfer_seen = True
    for holder in (message, *_choices(message)):
        prompt_ids = holder.get(_PROMPT_IDS_KEY)
        if isinstance(prompt_ids, list) and learned.prompt_ids is None:
            learned.prompt_ids = prompt_ids
    for choice in _choices(message):
        ids = choice.get(_IDS_KEY)
        if isinstance(ids, list):
            learned.generated_ids += ids


def _exists_only_for_its_ids(message: dict[str, Any]) -> bool:
    """Tell whether vLLM would not have sent this chunk had nobody asked for token ids.

    Its parsers swallow some tokens (of a tool call, say); such a chunk is sent only to carry the ids, with an empty delta.
    """
    choices = _choices(message)
    if len(choices) != 1 or isinstance(message.get(_TRANSFER_KEY), dict):
        return False
    choice = choices[0]
    return (
        choice.get("delta") == {}
        and choice.get("finish_reason") is None
        and choice.get("logprobs") is None
        and bool(choice.get(_IDS_KEY))
    )


def _hidden(
    text: bytes, found: list[splice.Member], message: dict[str, Any], watch: Watch, *, keep_null: bool
) -> tuple[dict[str, bytes], set[str]]:
    """Return what the client gets of the message's members instead, and which of them it does not get."""
    put: dict[str, bytes] = {}
    drop: set[str] = set()
    if message.get(_TRANSFER_KEY) is not None:
        at = splice.last(found, _TRANSFER_KEY)
        shown = watch.show_params(text[at.value_start : at.end])
        if shown is not None or keep_null:
            put[_TRANSFER_KEY] = shown or b"null"
        else:
            drop.add(_TRANSFER_KEY)
    if watch.hide_token_ids:
        if message.get(_PROMPT_IDS_KEY) is not None:
            put[_PROMPT_IDS_KEY] = b"null"
        if any(_shows_ids(choice) for choice in _choices(message)):
            at = splice.last(found, "choices")
            put["choices"] = _choices_without_ids(text[at.value_start : at.end])
    return put, drop


def _choices_without_ids(array: bytes) -> bytes:
    nothing = {_IDS_KEY: b"null", _PROMPT_IDS_KEY: b"null"}
    out: list[bytes] = []
    previous_end = 0
    for start, end in splice.elements(array, 0):
        choice = array[start:end]
        if splice.is_object(choice, 0):
            choice = splice.edit(choice, 0, splice.members(choice, 0), put=nothing)
        out += (array[previous_end:start], choice)
        previous_end = end
    out.append(array[previous_end:])
    return b"".join(out)


def _shows_ids(choice: dict[str, Any]) -> bool:
    return choice.get(_IDS_KEY) is not None or choice.get(_PROMPT_IDS_KEY) is not None


def _choices(message: dict[str, Any]) -> list[dict[str, Any]]:
    choices = message.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
