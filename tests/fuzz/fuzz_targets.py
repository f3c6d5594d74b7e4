"""What each fuzzer does with its bytes, and what must be true of the result: compared with a slow and obvious reader.

A target takes any bytes and raises ``AssertionError`` (or whatever kvloop should not have raised) when something is wrong.
Its first bytes say how to use the rest, so that a corpus file is that header and then real traffic.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import orjson
from fuzz_json import spelled

from extproc import handle as handles
from extproc import http2, legs, splice
from extproc.endpoints import CHAT, COMPLETIONS
from extproc.errors import ClientError
from extproc.handle import HandleRefused, read_publication
from extproc.prompt_mark import MARK_KEY, put_mark, take_mark
from extproc.proof import fingerprint, to_json
from extproc.request import EXTRA_ARGUMENTS_FIELD, FORBIDDEN_FIELDS, parse_request
from extproc.reuse import Attachment, prove
from extproc.sse import EventSplitter, EventTooLarge, event_data, replace_data
from extproc.store import StoredTurn
from extproc.turn import StreamedTurn, TurnFold, Watch, WholeTurn

LARGE = 10**9
HEADER_BYTES = 2
"""How to use the input, and how to cut it."""

SPELLED = 2
"""With this bit the input is no text but the choices by which ``fuzz_json`` makes one."""

TOKENS = 70
HANDLE = [
    (name, json.dumps(value))
    for name, value in {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[4, 9, 2]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "dcp_size": 1,
        "remote_num_tokens": TOKENS,
        "remote_blocks_expiry_time": 12345.678901234,
        "transfer_mode": "pull",
        MARK_KEY: {
            "v": 1,
            "tokens": 4,
            "chunks": "",
            "tail": [0, 1, 2, 3],
            "host": "10.0.0.7",
            "receipt": "outcome=cold",
        },
        handles.DIGEST_KEY: {**to_json(fingerprint(range(TOKENS))), "block_size": 32},
    }.items()
]


def pieces(data: bytes, seed: int) -> Iterator[bytes]:
    """Cut ``data``: whole (0), byte by byte (1), or in pieces of irregular sizes."""
    if not seed:
        yield data
        return
    at, size = 0, 1
    while at < len(data):
        yield data[at : at + size]
        at += size
        size = 1 if seed == 1 else 1 + (size * 31 + seed) % 61


# --- D's answers: server-sent events and whole bodies ---------------------------------------------------------------


def answer(data: bytes) -> None:
    """However an answer is cut, the client gets the same, everything of ours is hidden, and nothing else is touched."""
    how, cut, stream = data[0], data[1], data[HEADER_BYTES:]
    watch = Watch(bool(how & 1), bool(how & 3 == 3), LARGE, LARGE)
    kind = StreamedTurn if how & 4 else WholeTurn
    client, fold = _fed(kind(watch), pieces(stream, 0))
    again, other = _fed(kind(watch), pieces(stream, cut or 1))
    assert again == client, "the cuts show"
    assert other.learned == fold.learned, "the cuts change what is learnt"
    if b"kv_transfer_params" not in stream and b"token_ids" not in stream and b"\\u" not in stream:
        assert client == stream, "an answer with nothing of ours was changed"
    if how & 4:
        _check_splitter(stream, cut)
    for message in _messages(client, streamed=bool(how & 4)):
        assert message.get("kv_transfer_params") is None, "a handle reached the client"
        if watch.hide_token_ids:
            choices = message.get("choices")
            holders = [message, *(choices if isinstance(choices, list) else [])]
            shown = [holder for holder in holders if isinstance(holder, dict)]
            assert all(holder.get("prompt_token_ids") is None for holder in shown)
            assert all(holder.get("token_ids") is None for holder in shown[1:])
    if fold.learned.published is not None:
        assert isinstance(orjson.loads(fold.learned.published), dict)


def _fed(fold: TurnFold, chunks: Iterator[bytes]) -> tuple[bytes, TurnFold]:
    out = []
    for chunk in chunks:
        replaced = fold.feed(chunk, end=False)
        out.append(chunk if replaced is None else replaced)
    out.append(fold.feed(b"", end=True) or b"")
    return b"".join(out), fold


def _check_splitter(stream: bytes, cut: int) -> None:
    splitter = EventSplitter(LARGE)
    events = [event for piece in pieces(stream, cut) for event in splitter.feed(piece)]
    rest = splitter.flush()
    assert b"".join(events) + rest == stream, "bytes were lost or invented"
    for event in events:
        assert event_data(replace_data(event, b"x\ny")) in (b"x\ny", b""), "the new data is not the event's data"
    small = EventSplitter(16)
    try:
        for piece in pieces(stream, cut):
            small.feed(piece)
    except EventTooLarge:
        assert len(stream) > 16


def _messages(body: bytes, *, streamed: bool) -> list[dict[str, Any]]:
    """Read the JSON objects of a body line by line, as the standard says."""
    texts = [body]
    if streamed:
        lines = body.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        texts, data = [], []
        for line in [*lines, b""]:
            name, colon, value = line.partition(b":")
            if name == b"data":
                data.append(value[1:] if colon and value.startswith(b" ") else value)
            elif not line and data:
                texts.append(b"\n".join(data))
                data = []
    return [found for found in map(_parsed, texts) if isinstance(found, dict)]


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


# --- clients' requests ----------------------------------------------------------------------------------------------


def request(data: bytes) -> None:
    """A request is refused with an error for the client, or read like the standard library reads it, less what is forbidden."""
    endpoint = COMPLETIONS if data[0] & 1 else CHAT
    body = spelled(data[HEADER_BYTES:]) if data[0] & SPELLED else data[HEADER_BYTES:]
    try:
        parsed = parse_request(endpoint, body)
    except ClientError as error:
        assert error.status == 400  # noqa: PT017 - most inputs end here
        return
    assert parsed.fields == orjson.loads(parsed.raw), "the text and its parsed form differ"
    wanted = orjson.loads(body)
    assert FORBIDDEN_FIELDS.isdisjoint(parsed.fields)
    extra = parsed.fields.get(EXTRA_ARGUMENTS_FIELD)
    assert not isinstance(extra, dict) or FORBIDDEN_FIELDS.isdisjoint(extra)
    assert parsed.fields == _less_forbidden(wanted), "something else was taken out"
    assert (parsed.forbidden_fields_removed > 0) == (parsed.raw != body)
    _check_splice(body)
    ids = b"[1,2,3]"
    for leg in (
        legs.prefill_body(parsed, handles.COLD_PREFILL, ids),
        legs.decode_body(parsed, handles.DECODE_ALONE, ids, ask_token_ids=True),
    ):
        sent = orjson.loads(leg)
        assert sent["return_token_ids"] is True
        assert sent["kv_transfer_params"]["do_remote_prefill"] is False
    prefill = orjson.loads(legs.prefill_body(parsed, handles.COLD_PREFILL, None))
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    kept = {name: value for name, value in parsed.fields.items() if name not in legs.PREFILL_FIELDS}
    assert {name: prefill[name] for name in kept} == kept, "a field that shapes the prompt was changed"
    assert legs.decode_body(parsed, None, None, ask_token_ids=False) == parsed.raw


def _less_forbidden(fields: dict[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in fields.items() if name not in FORBIDDEN_FIELDS}
    extra = left.get(EXTRA_ARGUMENTS_FIELD)
    if isinstance(extra, dict):
        left[EXTRA_ARGUMENTS_FIELD] = {name: value for name, value in extra.items() if name not in FORBIDDEN_FIELDS}
    return left


def _check_splice(text: bytes) -> None:
    """Members, found by regular expressions, are those a parser finds: names, values, duplicates, order."""
    start = splice.object_start(text)
    assert start is not None
    found = splice.members(text, start)
    try:
        expected = json.loads(text, object_pairs_hook=_Pairs)
    except (RecursionError, ValueError):
        return  # the standard library is stricter on depth and on long numbers
    assert [member.key for member in found] == [name for name, _ in expected]
    for member, (_, value) in zip(found, expected, strict=True):
        assert json.loads(text[member.value_start : member.end], object_pairs_hook=_Pairs) == value
    assert splice.edit(text, start, found) == text, "an edit that changes nothing changed something"


class _Pairs(list[Any]):
    """An object's members in order, duplicates included."""


# --- D's handles ----------------------------------------------------------------------------------------------------


def handle(data: bytes) -> None:
    """Transfer parameters are refused, or what is made of them differs only where it should, and never claims too much."""
    raw = spelled(data[HEADER_BYTES:], HANDLE) if data[1] & SPELLED else data[HEADER_BYTES:]
    parsed = _parsed(raw)
    if not isinstance(parsed, dict):
        return
    _check_mark(raw, parsed)
    try:
        publication = read_publication(raw)
    except HandleRefused:
        return
    found = publication.handle
    params = orjson.loads(found.raw)
    assert params == {name: value for name, value in parsed.items() if name != handles.DIGEST_KEY}
    assert found.tokens == params["remote_num_tokens"] >= 1
    release = orjson.loads(handles.release_params(found))
    assert release == {**params, "remote_num_tokens": 0}
    with_ids = orjson.loads(handles.with_prompt_ids(found.raw, b"[5]"))
    assert with_ids == {**params, handles.PROMPT_IDS_KEY: [5]}
    assert isinstance(found.is_loopback, bool)
    if publication.sequence is None:
        return
    turn = StoredTurn(found, publication.sequence, publication.block_size_tokens, "m", 0.0)
    prompt = list(range(data[0] * 8))
    verdict = prove(turn, prompt, block_size_tokens=publication.block_size_tokens, min_tokens=1)
    if isinstance(verdict, Attachment):
        attached = orjson.loads(verdict.params)
        changed = {name for name in params if attached[name] != params[name]}
        assert changed <= {"remote_block_ids", "remote_num_tokens"}
        assert attached.keys() == params.keys()
        assert attached["remote_num_tokens"] == verdict.tokens < len(prompt)
        assert verdict.tokens <= min(publication.sequence.length, found.tokens)


def _check_mark(raw: bytes, parsed: dict[str, Any]) -> None:
    """Whatever a mark says, it is taken out, and nothing else but P's host changes."""
    params, mark = take_mark(raw)
    left = orjson.loads(params)
    unmarked = {name: value for name, value in parsed.items() if name != MARK_KEY}
    if mark is None:
        assert left == unmarked
        return
    assert mark.tokens >= 0
    assert left == unmarked or {**left, "remote_host": None} == {**unmarked, "remote_host": None}
    ids = list(range(TOKENS))
    again, same = take_mark(put_mark(params, ids, mark.receipt))
    assert (again, same is not None and same.agrees(fingerprint(ids), ids)) == (params, True)


# --- HTTP/2 ---------------------------------------------------------------------------------------------------------

FRAME = struct.Struct("!HBBBL")
MESSAGE_MAX_BYTES = 1 << 16


class Echo:
    """Serves a stream by sending back each message, and writes down what it is told."""

    def __init__(self, served: Served, stream: http2.Stream) -> None:
        self.served = served
        self.stream = stream
        self.messages: list[bytes] = []
        self.is_over = False
        self.waits = False

    def message_received(self, message: bytes) -> None:
        assert not self.is_over, "a message after the end"
        self.messages.append(message)
        connection = self.served.connection
        connection.consumed(self.stream, message)
        if not self.waits:
            self.waits = not connection.send_message(self.stream, message)

    def half_closed(self) -> None:
        assert not self.is_over, "ended twice"
        self.served.connection.finish(self.stream, 0)
        self.is_over = True

    def reset(self) -> None:
        assert not (self.is_over and self.stream.status is None and not self.stream.outgoing), "reset after its end"
        self.is_over = True

    def writable(self) -> None:
        assert self.waits, "nobody waits"
        self.waits = False


class Served:
    """A connection with a server that echoes, fed to its end or to where the peer broke the protocol."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.streams: dict[int, Echo] = {}
        self.connection = http2.Connection(self._open, max_message_bytes=MESSAGE_MAX_BYTES)
        self.out = self.connection.take_output()
        self.broken: int | None = None
        self.fed = b""
        for chunk in chunks:
            self.fed += chunk
            try:
                self.connection.receive(chunk)
            except http2.ConnectionBroken as broken:
                self.broken = broken.code
                self.connection.go_away(broken.code)
            self.out += self.connection.take_output()
            if self.broken is not None:
                break
        self.connection.abandon()

    def _open(self, stream: http2.Stream, _: http2.Headers) -> Echo:
        assert stream.id not in self.streams
        self.streams[stream.id] = Echo(self, stream)
        return self.streams[stream.id]


def connection(data: bytes) -> None:
    """A connection breaks for a named reason or serves whole messages, within the windows it was given, however bytes come."""
    cut, sent = data[1], http2.PREFACE + data[HEADER_BYTES:]
    if data[0] & 1:
        sent = data[HEADER_BYTES:]
    whole, pieced = Served(pieces(sent, 0)), Served(pieces(sent, cut or 1))
    assert pieced.broken == whole.broken
    assert pieced.out == whole.out, "the cuts show"
    assert {number: echo.messages for number, echo in pieced.streams.items()} == {
        number: echo.messages for number, echo in whole.streams.items()
    }
    assert not whole.connection.streams, "a stream outlived its connection"
    _check_windows(sent.removeprefix(http2.PREFACE), whole.out)


def _check_windows(received: bytes, out: bytes) -> None:
    """Our DATA never exceeds the widest window the peer can have meant; every frame of ours is well formed."""
    initial, granted = 65_535, {0: 65_535}
    for kind, flags, stream, payload in _frames(received):
        if kind == 0x4 and not flags & 1:
            for at in range(0, len(payload) - 5, 6):
                name, value = struct.unpack_from("!HL", payload, at)
                initial = max(initial, value) if name == 0x4 else initial
        if kind == 0x8:
            granted[stream] = granted.get(stream, 0) + (int.from_bytes(payload, "big") & 0x7FFFFFFF)
    used: dict[int, int] = {}
    for kind, _, stream, payload in _frames(out):
        if not kind:
            used[stream] = used.get(stream, 0) + len(payload)
    assert sum(used.values()) <= granted[0], "more was sent than the connection's window"
    for stream, size in used.items():
        assert size <= initial + granted.get(stream, 0), "more was sent than the stream's window"


def _frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at + FRAME.size <= len(data):
        high, low, kind, flags, stream = FRAME.unpack_from(data, at)
        start = at + FRAME.size
        at = start + (high << 8 | low)
        if at > len(data):
            return
        yield kind, flags, stream & 0x7FFFFFFF, data[start:at]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "answer": answer,
    "request": request,
    "handle": handle,
    "connection": connection,
}
"""By name, which is also the folder of its corpus."""


def run(name: str, data: bytes) -> None:
    """Give one input to a target; inputs too short for its header say nothing."""
    if len(data) >= HEADER_BYTES:
        TARGETS[name](data)
