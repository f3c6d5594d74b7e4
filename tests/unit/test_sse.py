"""Server-sent events, cut anywhere: nothing is lost, nothing invented, and the data is what a browser would see.

``browser_events`` below follows the standard letter by letter, one byte at a time, and shares no code with ``sse``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import sse
from extproc.sse import EventSplitter, EventTooLarge, event_data, replace_data

LARGE = 10**6
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
contents = st.sampled_from(
    [
        b"",
        b"data",
        b"data:",
        b"data: ",
        b"data: a",
        b"data:b",
        b"data:  two spaces",
        b'data: {"kv_transfer_params":',
        b"data: }",
        b"data: \xf0\x9f\xa7\x8a",
        b"data : no field",
        b"Data: no field",
        b"data\xef\xbb\xbf: no field",
        b": ping",
        b":data: a comment",
        b"event: message",
        b"id: 1",
        b"retry: 5",
        b"\x00\xff",
    ]
) | st.binary(max_size=5).map(lambda text: text.replace(b"\r", b"").replace(b"\n", b""))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream of lines with any line ends, blank lines where they fall, perhaps cut off before its last line end."""
    ends = line_ends if draw(st.booleans()) else st.just(draw(line_ends))
    lines = draw(st.lists(st.tuples(contents, ends), max_size=14))
    stream = b"".join(content + end for content, end in lines)
    mark = draw(st.sampled_from([b"", BYTE_ORDER_MARK]))
    return mark + stream + draw(st.sampled_from([b"", b"\n\n", b"data: rest", b"data"]))


def lines_of(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Split into lines and their ends, the last end empty, byte by byte."""
    lines, content, at = [], b"", 0
    while at < len(stream):
        end = stream[at : at + 2] if stream[at : at + 2] == b"\r\n" else stream[at : at + 1]
        if end in (b"\r\n", b"\r", b"\n"):
            lines.append((content, end))
            content = b""
        else:
            content += end
        at += len(end)
    return [*lines, (content, b"")]


def field_of(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    return name, value[1:] if colon and value.startswith(b" ") else value


def browser_events(stream: bytes) -> list[bytes]:
    """Data of every dispatched event: https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6."""
    stream = stream.removeprefix(BYTE_ORDER_MARK)
    dispatched, buffer = [], b""
    for line, end in lines_of(stream):
        if line == b"" and end:
            if buffer:
                dispatched.append(buffer[:-1])
            buffer = b""
        elif end and field_of(line)[0] == b"data":
            buffer += field_of(line)[1] + b"\n"
    return dispatched


def split(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """Feed the pieces; return the whole events and the rest."""
    splitter = EventSplitter(LARGE)
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.flush()


def cut_at(stream: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(places), len(stream)]
    return [stream[start:end] for start, end in pairwise(bounds)]


def inside_line_end(stream: bytes, place: int) -> bool:
    return stream[place - 1 : place + 1] == b"\r\n"


def said(events: list[bytes]) -> list[bytes]:
    return [data for data in map(event_data, events) if data]


@given(streams())
def test_hazard_38_events_are_what_a_browser_dispatches(stream: bytes) -> None:
    events, _ = split([stream])
    assert said(events) == [data for data in browser_events(stream) if data]


@given(streams())
def test_hazard_38_the_rest_without_its_empty_line_is_read_like_an_event(stream: bytes) -> None:
    _, rest = split([stream])
    assert said([rest]) == [data for data in browser_events(rest + b"\n\n") if data]


@given(streams())
def test_hazard_19_a_cut_at_any_byte_changes_no_byte_and_no_data(stream: bytes) -> None:
    whole_events, whole_rest = split([stream])
    for place in range(len(stream) + 1):
        events, rest = split(cut_at(stream, [place]))
        assert b"".join(events) + rest == stream
        assert said([*events, rest]) == said([*whole_events, whole_rest])
        if not inside_line_end(stream, place):
            assert (events, rest) == (whole_events, whole_rest)


@given(streams(), st.data())
def test_hazard_19_many_cuts_change_no_byte_and_no_data(stream: bytes, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    whole_events, whole_rest = split([stream])
    events, rest = split(cut_at(stream, places))
    assert b"".join(events) + rest == stream
    assert said([*events, rest]) == said([*whole_events, whole_rest])
    if not any(inside_line_end(stream, place) for place in places):
        assert (events, rest) == (whole_events, whole_rest)


@given(streams())
def test_hazard_37_byte_by_byte_is_the_same_stream(stream: bytes) -> None:
    whole_events, whole_rest = split([stream])
    events, rest = split([bytes([byte]) for byte in stream])
    assert b"".join(events) + rest == stream
    assert said([*events, rest]) == said([*whole_events, whole_rest])


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_hazard_20_an_event_leaves_with_the_byte_that_ends_it(end: bytes) -> None:
    splitter = EventSplitter(LARGE)
    event = b"data: a" + end + end
    handed_out = [splitter.feed(bytes([byte])) for byte in event]
    first = next(number for number, events in enumerate(handed_out) if events)
    assert event[first:].strip(b"\n") == event[first:][:1].strip(b"\n")  # at most the LF of a CRLF comes later
    assert handed_out[first] == [event[: first + 1]]


def test_the_splitter_tells_whether_part_of_an_event_waits() -> None:
    splitter = EventSplitter(LARGE)
    assert not splitter.holds_bytes
    splitter.feed(b"data: a\n\ndata")
    assert splitter.holds_bytes
    assert splitter.feed(b": b\n\n") == [b"data: b\n\n"]
    assert not splitter.holds_bytes


def test_after_a_flush_the_splitter_is_as_new() -> None:
    splitter = EventSplitter(LARGE)
    splitter.feed(b"data: a\n")
    assert splitter.flush() == b"data: a\n"
    assert splitter.flush() == b""
    assert splitter.feed(b"\ndata: b\n\n") == [b"\ndata: b\n\n"]


class CountingPattern:
    """Stands for a compiled pattern and counts the bytes it is made to look at."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self.pattern = pattern
        self.bytes_searched = 0

    def finditer(self, data: bytes, start: int) -> Iterator[re.Match[bytes]]:
        self.bytes_searched += len(data) - start
        return self.pattern.finditer(data, start)


@pytest.mark.parametrize("line_bytes", [1 << 30, 100], ids=["one line", "many lines"])
def test_hazard_43_a_handle_of_a_megabyte_in_small_pieces_is_searched_once(
    monkeypatch: pytest.MonkeyPatch, line_bytes: int
) -> None:
    counting = CountingPattern(sse._EVENT_END)
    monkeypatch.setattr(sse, "_EVENT_END", counting)
    blocks = b"".join(b"%d,%s" % (at, b"\n" * (at % line_bytes == 0 < at)) for at in range(180_000))
    event = b"data: " + blocks + b"\n\n"
    assert len(event) > 1 << 20
    splitter = sse.EventSplitter(len(event))
    pieces = [event[at : at + 512] for at in range(0, len(event), 512)]
    assert [found for piece in pieces for found in splitter.feed(piece)] == [event]
    assert counting.bytes_searched <= len(event) + 3 * len(pieces)


def test_hazard_43_an_event_may_be_exactly_as_large_as_the_bound() -> None:
    splitter = EventSplitter(10)
    assert splitter.feed(b"data: 7890") == []
    assert splitter.feed(b"\n\n") == [b"data: 7890\n\n"]


def test_hazard_43_an_event_that_outgrows_the_bound_is_reported() -> None:
    splitter = EventSplitter(10)
    splitter.feed(b"data: 7890")
    with pytest.raises(EventTooLarge):
        splitter.feed(b"1")


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data:\ndata\n\n", b"\n"),
        (b"data:  a\n\n", b" a"),
        (BYTE_ORDER_MARK + b"data: a\n\n", b"a"),
        (b"data: a\n" + BYTE_ORDER_MARK + b"data: b\n\n", b"a"),
        (b": ping\n\n", b""),
        (b"", b""),
    ],
)
def test_hazard_38_data_is_read_by_the_standard(event: bytes, data: bytes) -> None:
    assert event_data(event) == data
    assert browser_events(event + b"\n\n") == ([data] if b"data" in event else [])


def is_data(line: bytes) -> bool:
    return field_of(line)[0] == b"data"


def others(event: bytes) -> list[tuple[bytes, bytes]]:
    """Every line that carries no data, with its line end."""
    return [(line, end) for line, end in lines_of(event.removeprefix(BYTE_ORDER_MARK)) if not is_data(line)]


@given(streams(), st.text("{} \nab", max_size=6).map(str.encode))
def test_hazard_38_replacing_data_changes_the_data_lines_only(stream: bytes, data: bytes) -> None:
    events, rest = split([stream])
    for event in [*events, rest]:
        replaced = replace_data(event, data)
        has_data = any(is_data(line) for line, _ in lines_of(event.removeprefix(BYTE_ORDER_MARK)))
        assert event_data(replaced) == (data if has_data else b"")
        assert others(replaced) == others(event)
        assert replaced.startswith(BYTE_ORDER_MARK) == event.startswith(BYTE_ORDER_MARK)
        if not has_data:
            assert replaced == event


@given(streams(), st.text("{} \nab", max_size=6).map(str.encode))
def test_hazard_38_a_stream_with_replaced_data_has_the_same_events(stream: bytes, data: bytes) -> None:
    events, rest = split([stream])
    replaced = [replace_data(event, data) for event in events]
    assert browser_events(b"".join(replaced) + rest) == [data for _ in browser_events(stream)]


@pytest.mark.parametrize(
    ("event", "data", "replaced"),
    [
        (b"data: x\n\n", b"a", b"data: a\n\n"),
        (b"data:x\n\n", b"a", b"data:a\n\n"),
        (b"data\n\n", b"a", b"data:a\n\n"),
        (b"data:x\r\r", b"a\n b", b"data: a\rdata:  b\r\r"),
        (b"data:x\rid: 1\rdata:y\n\n", b"a", b"id: 1\rdata:a\n\n"),
        (b"data:x", b"a\nb", b"data:a\ndata:b"),
    ],
)
def test_hazard_38_new_data_is_spelled_like_the_old(event: bytes, data: bytes, replaced: bytes) -> None:
    assert replace_data(event, data) == replaced


@given(streams())
def test_replacing_data_by_itself_keeps_an_event_of_one_data_line(stream: bytes) -> None:
    for event in split([stream])[0]:
        data_lines = [line for line, _ in lines_of(event.removeprefix(BYTE_ORDER_MARK)) if is_data(line)]
        if len(data_lines) == 1 and data_lines != [b"data"]:
            assert replace_data(event, event_data(event)) == event


def test_an_event_is_too_large_even_if_no_line_of_it_ends() -> None:
    splitter = EventSplitter(10)
    assert splitter.feed(b"0123456789") == []
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x")


def test_an_event_is_too_large_even_if_some_lines_of_it_end() -> None:
    splitter = EventSplitter(10)
    assert splitter.feed(b"a\n\nb\ncdefg") == [b"a\n\n"]
    with pytest.raises(EventTooLarge):
        splitter.feed(b"hi\njklm")
