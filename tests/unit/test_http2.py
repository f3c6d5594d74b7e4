"""HTTP/2 as gRPC needs it: however bytes are cut, messages come out whole; flow control holds both ways; faults are named."""

from __future__ import annotations

import struct
import weakref
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc import http2

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"), ("te", "trailers")]
LIMIT = 1 << 20


def prefixed(message: bytes) -> bytes:
    return struct.pack("!BL", 0, len(message)) + message


class Recorder:
    """Serves a stream by writing down what happens to it."""

    def __init__(self, stream: http2.Stream, headers: http2.Headers) -> None:
        self.stream = stream
        self.headers = dict(headers)
        self.messages: list[bytes] = []
        self.told: list[str] = []

    def message_received(self, message: bytes) -> None:
        self.messages.append(message)

    def half_closed(self) -> None:
        self.told.append("half_closed")

    def reset(self) -> None:
        self.told.append("reset")

    def writable(self) -> None:
        self.told.append("writable")


class Pair:
    """Our server and hyper's client, joined byte by byte as the test wants."""

    def __init__(self, piece_bytes: int = 1 << 30, window: int = 65_535) -> None:
        self.served: list[Recorder] = []
        self.server = http2.Connection(self._open, max_message_bytes=LIMIT)
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.piece_bytes = piece_bytes
        self.events: list[Event] = []
        self.exchange()

    def _open(self, stream: http2.Stream, headers: http2.Headers) -> Recorder:
        self.served.append(Recorder(stream, headers))
        return self.served[-1]

    def exchange(self) -> None:
        """Carry bytes both ways until both are silent."""
        while True:
            to_server, to_client = self.client.data_to_send(), self.server.take_output()
            if not to_server and not to_client:
                return
            for start in range(0, len(to_server), self.piece_bytes):
                self.server.receive(to_server[start : start + self.piece_bytes])
            if to_client:
                self.events += self.client.receive_data(to_client)

    def call(self) -> tuple[int, Recorder]:
        """Open a stream."""
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST)
        self.exchange()
        return stream_id, self.served[-1]

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send data as far as our windows allow, frame by frame."""
        while data:
            room = min(self.client.local_flow_control_window(stream_id), self.client.max_outbound_frame_size)
            assert room, "the server gives no more room"
            self.client.send_data(stream_id, data[:room])
            data = data[room:]
            self.exchange()
        if end:
            self.client.end_stream(stream_id)
            self.exchange()

    def body(self, stream_id: int) -> bytes:
        """What of the answer has arrived."""
        return b"".join(e.data for e in self.of(DataReceived) if e.stream_id == stream_id)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 9, 24, 100, 1 << 30])
def test_messages_come_whole_and_in_order_however_bytes_are_cut(piece_bytes: int) -> None:
    pair = Pair(piece_bytes)
    one, first = pair.call()
    two, second = pair.call()
    dice = Random(piece_bytes)
    sent = [dice.randbytes(dice.choice((0, 1, 50, 3000))) for _ in range(20)]
    stream = b"".join(map(prefixed, sent))
    cut = dice.randrange(len(stream))
    pair.send(one, stream[:cut])
    pair.send(two, prefixed(b"other"))
    pair.send(one, stream[cut:], end=True)
    assert first.messages == sent
    assert (second.messages, second.told) == ([b"other"], [])
    assert first.told == ["half_closed"]
    assert first.headers[b":path"] == b"/a.B/C"


def test_a_message_of_many_frames_is_one_message() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    message = bytes(900_000)
    pair.send(stream_id, prefixed(message))
    assert served.messages == [message]


def test_answers_carry_grpcs_headers_messages_and_trailers() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    pair.send(stream_id, prefixed(b"q"), end=True)
    assert pair.server.send_message(served.stream, b"a")
    assert pair.server.send_message(served.stream, b"")
    pair.server.finish(served.stream, 0)
    pair.exchange()
    (response,), (trailers,) = pair.of(ResponseReceived), pair.of(TrailersReceived)
    assert dict(response.headers) == {b":status": b"200", b"content-type": b"application/grpc"}
    assert dict(trailers.headers) == {b"grpc-status": b"0"}
    assert pair.body(stream_id) == prefixed(b"a") + prefixed(b"")
    assert [event.stream_id for event in pair.of(StreamEnded)] == [stream_id]
    assert not pair.of(StreamReset)
    assert (pair.server.streams, served.stream.is_closed) == ({}, True)


def test_a_stream_may_end_without_a_message_and_before_the_peer_is_done() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    pair.server.finish(served.stream, 13, "why")
    pair.exchange()
    assert dict(pair.of(TrailersReceived)[0].headers) == {b"grpc-status": b"13", b"grpc-message": b"why"}
    assert pair.of(StreamReset)[0].error_code == http2.NO_ERROR
    assert pair.server.send_message(served.stream, b"too late")
    pair.server.finish(served.stream, 0)
    assert pair.server.take_output() == b""
    # What was under way meanwhile is nobody's fault.
    pair.server.receive(frame(0x0, 0, stream_id, prefixed(b"late")))
    assert served.messages == []


@pytest.mark.parametrize("window", [0, 1, 10, 16_383, 100_000])
def test_no_more_is_sent_than_the_stream_has_room_for(window: int) -> None:
    pair = Pair(window=window)
    stream_id, served = pair.call()
    message = Random(1).randbytes(50_000)
    went = pair.server.send_message(served.stream, message)
    pair.server.finish(served.stream, 0)
    pair.exchange()
    whole = prefixed(message)
    assert went is (window > len(whole))
    assert pair.body(stream_id) == whole[:window]
    while not pair.of(StreamEnded):
        pair.client.increment_flow_control_window(7_000, stream_id)
        pair.exchange()
    assert pair.body(stream_id) == whole
    assert dict(pair.of(TrailersReceived)[0].headers)[b"grpc-status"] == b"0"


def test_no_more_is_sent_than_the_connection_has_room_for_and_streams_take_turns() -> None:
    pair = Pair(window=1 << 20)
    calls = [pair.call() for _ in range(2)]
    for _, served in calls:
        pair.server.send_message(served.stream, bytes(60_000))
    pair.exchange()
    assert sum(len(pair.body(stream_id)) for stream_id, _ in calls) == 65_535
    assert [served.told for _, served in calls] == [[], []]
    pair.client.increment_flow_control_window(200_000)
    pair.exchange()
    assert [len(pair.body(stream_id)) for stream_id, _ in calls] == [60_005, 60_005]
    assert [served.told for _, served in calls] == [[], ["writable"]]


def test_a_reader_that_lags_stops_its_own_sender_only() -> None:
    pair = Pair()
    slow, reader = pair.call()
    quick, other = pair.call()
    message = bytes(10_000)
    with pytest.raises(AssertionError, match="no more room"):
        pair.send(slow, prefixed(message) * 500)
    assert len(reader.messages) * len(message) <= 2 * http2.STREAM_WINDOW
    for _ in range(500):
        pair.send(quick, prefixed(message))
        pair.server.consumed(other.stream, other.messages[-1])
        pair.exchange()
    assert len(other.messages) == 500
    for taken in reader.messages:
        pair.server.consumed(reader.stream, taken)
    pair.exchange()
    assert pair.client.local_flow_control_window(slow) > 0


def test_a_reset_by_the_peer_reaches_its_stream_alone() -> None:
    pair = Pair()
    one, first = pair.call()
    _, second = pair.call()
    pair.client.reset_stream(one)
    pair.exchange()
    assert (first.told, second.told) == (["reset"], [])
    assert first.stream.is_closed


def test_a_lost_connection_resets_every_stream_once() -> None:
    pair = Pair()
    served = [pair.call()[1] for _ in range(3)]
    pair.server.abandon()
    pair.server.abandon()
    assert [each.told for each in served] == [["reset"]] * 3


@pytest.mark.parametrize("data", [struct.pack("!BL", 1, 0), struct.pack("!BL", 0, LIMIT + 1)])
def test_messages_that_are_compressed_or_too_large_end_their_stream(data: bytes) -> None:
    pair = Pair()
    stream_id, served = pair.call()
    pair.send(stream_id, data)
    assert (served.messages, served.told) == ([], ["reset"])
    assert pair.of(StreamReset)[0].error_code == http2.INTERNAL_ERROR


def test_pings_are_answered() -> None:
    pair = Pair()
    pair.client.ping(b"12345678")
    pair.exchange()
    assert [event.ping_data for event in pair.of(PingAckReceived)] == [b"12345678"]


def test_going_away_serves_what_was_opened_before_the_peer_knew() -> None:
    server, served = opened()
    server.take_output()
    server.shut_down()
    goodbye = frame(0x7, 0, 0, bytes.fromhex("7fffffff") + bytes(4)) + frame(0x6, 0, 0, http2._SHUTDOWN_PING)
    assert server.take_output() == goodbye
    block = Encoder().encode(REQUEST)
    server.receive(frame(0x1, 0x4, 3, block))
    assert len(served) == 2
    server.receive(frame(0x6, 0x1, 0, http2._SHUTDOWN_PING))
    assert server.take_output() == frame(0x7, 0, 0, (3).to_bytes(4, "big") + bytes(4))
    server.receive(frame(0x1, 0x4, 5, block))
    assert len(served) == 2
    assert server.take_output() == frame(0x3, 0, 5, http2.REFUSED_STREAM.to_bytes(4, "big"))


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def opened() -> tuple[http2.Connection, list[Recorder]]:
    pair = Pair()
    pair.call()
    return pair.server, pair.served


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(0x0, 0, 0, b""), http2.PROTOCOL_ERROR),
        (frame(0x0, 0, 99, b""), http2.PROTOCOL_ERROR),
        (frame(0x0, 0x8, 1, b""), http2.PROTOCOL_ERROR),
        (frame(0x0, 0x8, 1, b"\x05abc"), http2.PROTOCOL_ERROR),
        (frame(0x1, 0x4, 2, b""), http2.PROTOCOL_ERROR),
        (frame(0x1, 0x4, 3, b"\xff\xff\xff\xff\xff"), http2.COMPRESSION_ERROR),
        (frame(0x1, 0, 3, b"") + frame(0x0, 0, 1, b""), http2.PROTOCOL_ERROR),
        (frame(0x1, 0, 3, b"") + frame(0x9, 0x4, 5, b""), http2.PROTOCOL_ERROR),
        (frame(0x1, 0, 3, bytes(16_000)) + frame(0x9, 0, 3, bytes(16_000)) * 4, http2.PROTOCOL_ERROR),
        (frame(0x9, 0x4, 3, b""), http2.PROTOCOL_ERROR),
        (frame(0x5, 0x4, 1, bytes(4)), http2.PROTOCOL_ERROR),
        (frame(0x6, 0, 0, b"short"), http2.FRAME_SIZE_ERROR),
        (frame(0x6, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
        (frame(0x4, 0, 0, b"short"), http2.FRAME_SIZE_ERROR),
        (frame(0x4, 0, 1, b""), http2.PROTOCOL_ERROR),
        (frame(0x4, 0x1, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
        (frame(0x3, 0, 1, bytes(3)), http2.FRAME_SIZE_ERROR),
        (frame(0x3, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
        (frame(0x3, 0, 99, bytes(4)), http2.PROTOCOL_ERROR),
        (frame(0x8, 0, 1, bytes(5)), http2.FRAME_SIZE_ERROR),
        (frame(0x8, 0, 99, bytes([0, 0, 0, 1])), http2.PROTOCOL_ERROR),
        (frame(0x1, 0x4, 0, b""), http2.PROTOCOL_ERROR),
        (frame(0x1, 0x4 | 0x20, 3, bytes(4)), http2.FRAME_SIZE_ERROR),
        (frame(0x4, 0, 0, struct.pack("!HL", 4, 2**31)), http2.FLOW_CONTROL_ERROR),
        (frame(0x4, 0, 0, struct.pack("!HL", 5, 100)), http2.PROTOCOL_ERROR),
        (frame(0x8, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
        (frame(0x8, 0, 0, (2**31 - 1).to_bytes(4, "big")), http2.FLOW_CONTROL_ERROR),
        (frame(0x0, 0, 1, bytes(16_385)), http2.FRAME_SIZE_ERROR),
    ],
)
def test_broken_protocol_ends_the_connection_with_its_reason(data: bytes, code: int) -> None:
    server, _ = opened()
    with pytest.raises(http2.ConnectionBroken) as broken:
        server.receive(data)
    assert broken.value.code == code


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"P", b"PRI * HTTP/2.0\r\n\r\nXX"])
def test_what_is_not_http2_is_told_from_what_is_not_there_yet(start: bytes) -> None:
    server = http2.Connection(lambda _s, _h: pytest.fail("no stream was opened"), max_message_bytes=LIMIT)
    if http2.PREFACE.startswith(start):
        server.receive(start)
        server.receive(http2.PREFACE[len(start) :])
    else:
        with pytest.raises(http2.ConnectionBroken):
            server.receive(start)


def test_frames_nobody_needs_are_passed_over() -> None:
    server, served = opened()
    server.take_output()
    server.receive(frame(0x2, 0, 1, bytes(5)) + frame(0x7, 0, 0, bytes(8)) + frame(0xEE, 0, 1, b"?"))
    server.receive(frame(0x4, 1, 0, b""))
    server.receive(frame(0x4, 0, 0, struct.pack("!HLHL", 99, 1, 1, 0)))
    assert served[0].told == []
    assert server.take_output() == frame(0x4, 1, 0, b"")


def test_what_was_under_way_when_a_stream_ended_is_passed_over() -> None:
    server, served = opened()
    server.finish(served[0].stream, 0)
    server.take_output()
    server.receive(frame(0x8, 0, 1, (1).to_bytes(4, "big")) + frame(0x3, 0, 1, bytes(4)) + frame(0x0, 0, 1, b"x"))
    assert (served[0].told, server.take_output()) == ([], b"")


def test_padding_and_priority_are_taken_off() -> None:
    server, served = opened()
    server.receive(frame(0x0, 0x8, 1, b"\x03" + prefixed(b"x") + bytes(3)))
    assert served[0].messages == [b"x"]
    block = bytes(5) + Pair().client.encoder.encode(REQUEST)
    server.receive(frame(0x1, 0x20 | 0x8, 3, b"\x02" + block[:9] + bytes(2)) + frame(0x9, 0x4, 3, block[9:]))
    assert served[1].headers[b":path"] == b"/a.B/C"


def test_a_stream_that_breaks_the_rules_is_reset_and_the_others_live() -> None:
    server, served = opened()
    server.receive(frame(0x0, 0x1, 1, prefixed(b"x")))
    server.take_output()
    server.receive(frame(0x0, 0, 1, prefixed(b"after the end")))
    assert served[0].told == ["half_closed", "reset"]
    assert server.take_output() == frame(0x3, 0, 1, http2.STREAM_CLOSED.to_bytes(4, "big"))
    server, served = opened()
    server.receive(frame(0x8, 0, 1, (2**31 - 1).to_bytes(4, "big")))
    assert served[0].told == ["reset"]


def test_more_than_the_window_allows_resets_the_stream() -> None:
    server, served = opened()
    for _ in range(3 * http2.STREAM_WINDOW // 16_384 + 1):
        server.receive(frame(0x0, 0, 1, prefixed(bytes(16_379))))
    assert served[0].told == ["reset"]


def test_the_connections_window_is_renewed() -> None:
    server, served = opened()
    server.take_output()
    server._uncredited_bytes = 2**30
    server.receive(frame(0x0, 0, 1, prefixed(b"x")))
    assert server.take_output() == frame(0x8, 0, 0, (2**30 + 6).to_bytes(4, "big"))
    assert served[0].messages == [b"x"]


def test_a_changed_initial_window_counts_for_open_streams() -> None:
    pair = Pair(window=0)
    stream_id, served = pair.call()
    assert pair.server.send_message(served.stream, b"abc") is False
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.exchange()
    assert (pair.body(stream_id), served.told) == (prefixed(b"abc"), ["writable"])


def test_a_stream_that_ends_inside_a_message_gets_no_more_of_what_came_with_it() -> None:
    pair = Pair()
    stream_id, served = pair.call()

    def end(message: bytes) -> None:
        served.messages.append(message)
        pair.server.finish(served.stream, 0)

    served.message_received = end  # type: ignore[method-assign]
    pair.server.receive(frame(0x0, 0x1, stream_id, prefixed(b"first") + prefixed(b"second")))
    assert (served.messages, served.told) == ([b"first"], [])


def test_what_flow_control_holds_of_a_reset_stream_is_forgotten() -> None:
    pair = Pair(window=0)
    stream_id, served = pair.call()
    pair.server.send_message(served.stream, b"abc")
    pair.client.reset_stream(stream_id)
    pair.exchange()
    pair.client.increment_flow_control_window(10)
    pair.exchange()
    assert served.told == ["reset"]


def test_a_message_may_be_given_back_later_than_its_stream_ends() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    for _ in range(40):
        pair.send(stream_id, prefixed(bytes(15_000)))
    pair.client.end_stream(stream_id)
    pair.exchange()
    for message in served.messages:
        pair.server.consumed(served.stream, message)
    assert pair.server.take_output() == b""


def test_trailers_end_the_peers_side() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    pair.client.send_headers(stream_id, [("x", "y")], end_stream=True)
    pair.exchange()
    assert served.told == ["half_closed"]


def test_late_header_blocks_of_ended_streams_still_teach_the_decoder() -> None:
    pair = Pair()
    stream_id, served = pair.call()
    pair.server.finish(served.stream, 0)
    pair.server.take_output()
    pair.client.send_headers(stream_id, [("x-new", "value")], end_stream=True)
    pair.client.send_headers(stream_id + 2, [*REQUEST, ("x-new", "value")])
    pair.server.receive(pair.client.data_to_send())
    assert pair.served[1].headers[b"x-new"] == b"value"


def test_headers_after_the_peers_end_reset_the_stream() -> None:
    server, served = opened()
    server.take_output()
    trailers = frame(0x1, 0x4 | 0x1, 1, Encoder().encode([("x", "y")]))
    server.receive(trailers + trailers)
    assert served[0].told == ["half_closed", "reset"]
    assert server.take_output() == frame(0x3, 0, 1, http2.STREAM_CLOSED.to_bytes(4, "big"))


def test_an_answer_to_a_ping_of_nobodys_is_nothing() -> None:
    server, served = opened()
    server.take_output()
    server.receive(frame(0x6, 0x1, 0, b"whatever"))
    assert (server.take_output(), served[0].told) == (b"", [])


@pytest.mark.parametrize("by_peer", [False, True])
def test_an_ended_stream_keeps_nothing_alive(*, by_peer: bool) -> None:
    """A request's body would else wait for the garbage collector."""
    server, served = opened()
    recorder, seen = served.pop(), []
    seen.append(weakref.ref(recorder))
    if by_peer:
        server.receive(frame(0x3, 0, 1, bytes(4)))
    else:
        server.finish(recorder.stream, 0)
    del recorder
    assert seen[0]() is None


def test_a_stream_is_reset_once() -> None:
    server, served = opened()
    server.take_output()
    for _ in range(2):
        server.reset(served[0].stream, http2.INTERNAL_ERROR)
    assert served[0].told == ["reset"]
    assert server.take_output() == frame(0x3, 0, 1, http2.INTERNAL_ERROR.to_bytes(4, "big"))


def test_no_stream_comes_before_settings() -> None:
    server = http2.Connection(lambda _s, _h: pytest.fail("no stream was opened"), max_message_bytes=LIMIT)
    with pytest.raises(http2.ConnectionBroken) as broken:
        server.receive(http2.PREFACE + frame(0x1, 0x4, 1, Encoder().encode(REQUEST)))
    assert broken.value.code == http2.PROTOCOL_ERROR


def test_a_stream_may_be_reset_while_others_are_told_to_go_on() -> None:
    pair = Pair(window=0)
    calls = [pair.call() for _ in range(2)]
    for _, served in calls:
        pair.server.send_message(served.stream, b"abc")
    (_, first), (_, second) = calls
    first.writable = lambda: pair.server.reset(second.stream, http2.INTERNAL_ERROR)  # type: ignore[method-assign]
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.exchange()
    assert second.told == ["reset"]
    assert pair.body(calls[1][0]) == b""


def test_a_large_answer_leaves_in_time_linear_in_its_size() -> None:
    """Counted, not timed: what is copied for each frame is that frame."""
    server, served = opened()
    server.take_output()
    server.receive(frame(0x8, 0, 0, (2**30).to_bytes(4, "big")))

    class Counting(bytes):
        copied = 0

        def __getitem__(self, part: Any) -> Any:
            got = super().__getitem__(part)
            Counting.copied += len(got)
            return got

    stream = served[0].stream
    message = Counting(5_000_000)
    stream.outgoing.append(message)
    stream.send_window = 2**30
    server._send_outgoing(stream)
    assert Counting.copied == len(message)
    assert len(server.take_output()) > len(message)


# --- floods: whatever a peer sends, what is held for it is bounded ---------------------------------------------------


def held_bytes(server: http2.Connection) -> int:
    """Everything a connection holds that came from its peer, or waits for it."""
    streams = [*server.streams.values(), *server._blocked.values()]
    block = server._header_block[2] if server._header_block else b""
    return (
        len(server._held)
        + len(block)
        + sum(len(stream.partial) + sum(map(len, stream.outgoing)) for stream in streams)
        + 100 * len(streams)
    )


def headers(stream_id: int, *, end: bool = False) -> bytes:
    return frame(0x1, 0x4 | end, stream_id, REQUEST_BLOCK)


REQUEST_BLOCK = Encoder().encode([(name, value) for name, value in REQUEST[:2]])
"""Names only what is in HPACK's static table, so that it may be sent again and again."""


@pytest.mark.parametrize(
    "flood",
    [
        frame(0x6, 0, 0, b"12345678"),
        frame(0x6, 0x1, 0, b"12345678"),
        frame(0x4, 0, 0, b""),
        frame(0x4, 0, 0, struct.pack("!HLHL", 1, 0, 1, 4096)),
        frame(0x4, 0, 0, struct.pack("!HLHL", 4, 0, 4, 2**31 - 1)),
        frame(0x0, 0, 1, b""),
        frame(0x0, 0x8, 1, b"\x00"),
        frame(0x0, 0, 1, prefixed(b"")),
        frame(0x2, 0, 1, bytes(5)),
        frame(0x7, 0, 0, bytes(8)),
        frame(0xEE, 0, 1, bytes(16)),
        frame(0x3, 0, 1, bytes(4)),
    ],
    ids=lambda data: data[:9].hex(),
)
def test_a_flood_leaves_nothing_behind_and_is_answered_by_no_more_than_itself(flood: bytes) -> None:
    server, _ = opened()
    server.take_output()
    before = held_bytes(server)
    for _ in range(100):
        server.receive(flood * 100)
        assert len(server.take_output()) <= len(flood) * 100
    assert held_bytes(server) <= before


def test_a_flood_of_opened_and_reset_streams_leaves_nothing_behind() -> None:
    server, served = opened()
    before = held_bytes(server)
    for number in range(3, 20_003, 2):
        server.receive(headers(number) + frame(0x3, 0, number, bytes(4)))
    assert held_bytes(server) == before
    assert {tuple(each.told) for each in served[1:]} == {("reset",)}


def test_streams_reset_while_their_answers_are_held_back_leave_nothing_behind() -> None:
    server, served = opened()
    server.receive(frame(0x4, 0, 0, struct.pack("!HL", 4, 0)))
    before = held_bytes(server)
    for number in range(3, 2_003, 2):
        server.receive(headers(number))
        assert server.send_message(served[-1].stream, bytes(1000)) is False
        server.receive(frame(0x3, 0, number, bytes(4)))
    assert held_bytes(server) == before


def test_no_more_streams_than_the_limit_are_open_at_once() -> None:
    server, served = opened()
    server.take_output()
    last = 2 * http2.MAX_STREAMS + 1
    for number in range(3, last + 2, 2):
        server.receive(headers(number))
    assert len(server.streams) == len(served) == http2.MAX_STREAMS
    assert server.take_output() == frame(0x3, 0, last, http2.REFUSED_STREAM.to_bytes(4, "big"))
    server.receive(frame(0x3, 0, 1, bytes(4)) + headers(last + 2))
    assert served[-1].stream.id == last + 2


def test_the_peer_is_told_the_limit_of_streams() -> None:
    pair = Pair()
    assert pair.client.remote_settings.max_concurrent_streams == http2.MAX_STREAMS


@pytest.mark.parametrize("piece", [b"", b"x", bytes(16_384)])
def test_a_header_block_without_end_is_bounded(piece: bytes) -> None:
    server, _ = opened()

    def flood() -> None:
        server.receive(frame(0x1, 0, 3, b""))
        for _ in range(100):
            server.receive(frame(0x9, 0, 3, piece))
            assert held_bytes(server) <= http2.HEADER_BLOCK_MAX_BYTES + 1000

    with pytest.raises(http2.ConnectionBroken) as broken:
        flood()
    assert broken.value.code == http2.PROTOCOL_ERROR


def test_a_small_header_block_that_unpacks_to_a_huge_one_breaks_the_connection() -> None:
    server, _ = opened()
    encoder = Encoder()
    bomb = encoder.encode([("x", "a" * 4000)]) + encoder.encode([("x", "a" * 4000)]) * 1000
    assert len(bomb) < http2.HEADER_BLOCK_MAX_BYTES // 8
    with pytest.raises(http2.ConnectionBroken) as broken:
        server.receive(frame(0x1, 0x4, 3, bomb))
    assert broken.value.code == http2.COMPRESSION_ERROR


def test_a_message_never_finished_is_bounded_by_the_largest_allowed() -> None:
    server, served = opened()
    server.receive(frame(0x0, 0, 1, struct.pack("!BL", 0, LIMIT)))
    piece = frame(0x0, 0, 1, b"x" * 1024)
    for _ in range(LIMIT // 1024 - 1):
        server.receive(piece)
        assert held_bytes(server) <= LIMIT + 1000
    assert (served[0].messages, served[0].told) == ([], [])
    server.receive(piece)
    assert [len(message) for message in served[0].messages] == [LIMIT]


# --- any conversation, cut anywhere ----------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 3)),
        st.tuples(st.just("send"), st.integers(0, 3), st.binary(max_size=40)),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.integers(0, 3)),
        st.tuples(st.just("ping"), st.just(0)),
        st.tuples(st.just("window"), st.integers(0, 100)),
    ),
    max_size=25,
)


def spoken(steps: list[tuple[Any, ...]]) -> tuple[bytes, dict[int, list[bytes]]]:
    """Have hyper's client say this; return its bytes, and what it sent on streams it did not reset."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    is_open: dict[int, int] = {}
    sent: dict[int, list[bytes]] = {}
    for kind, which, *rest in steps:
        stream_id = is_open.get(which)
        match kind:
            case "open":
                stream_id = is_open[which] = client.get_next_available_stream_id()
                sent[stream_id] = []
                client.send_headers(stream_id, REQUEST)
            case "ping":
                client.ping(b"12345678")
            case "window":
                client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: which})
            case "send" if stream_id is not None:
                client.send_data(stream_id, prefixed(rest[0]), pad_length=len(rest[0]) or None)
                sent[stream_id].append(rest[0])
            case "end" if stream_id is not None:
                client.end_stream(is_open.pop(which))
            case "reset" if stream_id is not None:
                client.reset_stream(is_open.pop(which))
    return client.data_to_send(), sent


class Echo(Recorder):
    """Answers each message by itself, and ends when its peer does."""

    def __init__(self, server: http2.Connection, stream: http2.Stream, headers: http2.Headers) -> None:
        super().__init__(stream, headers)
        self.server = server

    def message_received(self, message: bytes) -> None:
        super().message_received(message)
        self.server.consumed(self.stream, message)
        self.server.send_message(self.stream, message)

    def half_closed(self) -> None:
        super().half_closed()
        self.server.finish(self.stream, 0)


def heard(pieces: list[bytes]) -> tuple[bytes, list[tuple[Any, ...]], int | None]:
    """Feed a fresh server; return all it sent, all its streams saw, and the code it broke with."""
    streams: list[Echo] = []

    def open_stream(stream: http2.Stream, headers: http2.Headers) -> Echo:
        streams.append(Echo(server, stream, headers))
        return streams[-1]

    server = http2.Connection(open_stream, max_message_bytes=1000)
    code = None
    try:
        for piece in pieces:
            server.receive(piece)
    except http2.ConnectionBroken as broken:
        code = broken.code
    return server.take_output(), [(each.stream.id, each.headers, each.messages, each.told) for each in streams], code


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(at)]


PLACES = st.lists(st.integers(0, 10**6), max_size=12)


@given(steps=STEPS, places=PLACES)
def test_any_conversation_is_understood_and_the_same_however_it_is_cut(
    steps: list[tuple[Any, ...]], places: list[int]
) -> None:
    data, sent = spoken(steps)
    output, saw, code = heard([data])
    assert code is None
    assert {stream_id: messages for stream_id, _, messages, _ in saw} == sent
    assert heard(cut(data, places)) == (output, saw, code)
    assert heard([bytes([byte]) for byte in data]) == (output, saw, code)


@given(steps=STEPS, places=PLACES, noise=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=4))
def test_damaged_bytes_break_the_connection_or_a_stream_the_same_way_however_they_are_cut(
    steps: list[tuple[Any, ...]], places: list[int], noise: list[tuple[int, bytes]]
) -> None:
    data, _ = spoken(steps)
    for place, junk in noise:
        at = len(http2.PREFACE) + place % (len(data) - len(http2.PREFACE) + 1)
        data = data[:at] + junk + data[at + len(junk) :]
    assert heard(cut(data, places)) == heard([data])
