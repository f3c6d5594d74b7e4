"""gRPC's wire as a server sees it: HTTP/2 frames and message prefixes; bytes in, calls on streams and bytes out, no I/O.

Envoy speaks HTTP/2 with prior knowledge on a few long-lived connections, with many streams and small messages. Here one
read may bring dozens of messages, and all their answers leave in one write. gRPC's own asyncio server spends most of its
time handing each message from a thread to the event loop and back (docs/performance.md has the numbers).

Rules that must stay true:

* No more is sent than the peer's flow control allows, on the connection and on the stream.
* A stream whose reader lags holds up its own sender only: its window is not renewed, the connection's is.
* Whatever breaks the protocol ends the connection with GOAWAY, or the stream with RST_STREAM, and nothing else.
* Header blocks are decoded in the order in which they stand on the wire: HPACK has memory. What we send needs none.
* What a peer can make us hold is bounded: ``MAX_STREAMS`` at once, for each an unread window and one unfinished message,
  and one header block. All else (pings, settings, resets, empty frames) leaves nothing but an answer no longer than
  itself, and the shell reads no more while answers wait to be written.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the ``hpack`` package),
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from hpack import Decoder, Encoder, NeverIndexedHeaderTuple
from hpack.exceptions import HPACKError

if TYPE_CHECKING:
    from collections.abc import Callable

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME: Final = struct.Struct("!HBBBL")
"""Length (high 16 bits, low 8), kind, flags, stream."""

_PREFIX: Final = struct.Struct("!BL")
"""gRPC's: whether the message is compressed, and its length."""

_SETTING: Final = struct.Struct("!HL")
_FRAME_BYTES: Final = _FRAME.size
_PREFIX_BYTES: Final = _PREFIX.size

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x5, 0x6, 0x7
_WINDOW_UPDATE, _CONTINUATION = 0x8, 0x9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 0x3, 0x4

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR = 0x5, 0x6, 0x7, 0x9

_DEFAULT_WINDOW: Final = 65_535
_LARGEST_WINDOW: Final = 2**31 - 1
_STREAM_ID: Final = 2**31 - 1
STREAM_WINDOW: Final = 1024 * 1024
"""Unread bytes a stream may hold, as Envoy's own stream buffer."""

_SMALLEST_MAX_FRAME, _LARGEST_MAX_FRAME = 16_384, 2**24 - 1
"""Of what a setting may be; ours stays at the default, the smallest."""

MAX_STREAMS: Final = 4096
"""Open at once on one connection. Envoy opens another connection for more."""

HEADER_BLOCK_MAX_BYTES: Final = 64 * 1024
_HEADER_BLOCK_MAX_FRAMES: Final = 16
_PRIORITY_BYTES: Final = 5
_PING_BYTES: Final = 8
_CODE_BYTES: Final = 4
_SHUTDOWN_PING: Final = b"goodbye\0"

Headers = list[tuple[bytes, bytes]]


def _encoded(*headers: tuple[str, str]) -> bytes:
    """Encode headers without HPACK's table, so that they read the same on every connection at any time."""
    block: bytes = Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in headers])
    return block


_RESPONSE_HEADERS: Final = _encoded((":status", "200"), ("content-type", "application/grpc"))
_OK_TRAILERS: Final = _encoded(("grpc-status", "0"))


class ConnectionBroken(Exception):
    """The peer broke the protocol; ``code`` goes into GOAWAY."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class StreamEvents(Protocol):
    """What a connection calls on whoever serves a stream. Messages come whole and in order."""

    def message_received(self, message: bytes) -> None:
        """Take a message; tell ``Connection.consumed`` once it is worked off."""

    def half_closed(self) -> None:
        """Note that the peer sends no more messages."""

    def reset(self) -> None:
        """Drop it: the stream is gone, by the peer's will or because something broke."""

    def writable(self) -> None:
        """Go on: all that ``send_message`` held back has left."""


@dataclass(slots=True, eq=False)
class Stream:
    """One stream's framing and flow control. Only its connection touches it; others read ``is_closed`` at most."""

    id: int
    send_window: int
    events: StreamEvents = field(init=False)
    is_closed: bool = False
    partial: bytearray = field(default_factory=bytearray)
    outgoing: deque[bytes] = field(default_factory=deque)
    sent_of_first: int = 0
    status: tuple[int, str] | None = None
    opened: bool = False
    ended_by_peer: bool = False
    unread_bytes: int = 0
    uncredited_bytes: int = 0


class Connection:
    """One connection. Feed it by ``receive``; after each call of any method send what ``take_output`` returns.

    ``open_stream`` is called with each new stream and its headers, and returns who serves it. Nothing may be sent on the
    stream before it has returned.
    """

    def __init__(self, open_stream: Callable[[Stream, Headers], StreamEvents], *, max_message_bytes: int) -> None:
        self.streams: dict[int, Stream] = {}
        self._open_stream = open_stream
        self._max_message_bytes = max_message_bytes
        self._decoder = Decoder(max_header_list_size=HEADER_BLOCK_MAX_BYTES)
        self._held = b""
        self._preface_missing = True
        self._settings_missing = True
        self._out: list[bytes] = []
        self._send_window = _DEFAULT_WINDOW
        self._uncredited_bytes = 0
        self._peer_initial_window = _DEFAULT_WINDOW
        self._peer_max_frame = _SMALLEST_MAX_FRAME
        self._blocked: dict[int, Stream] = {}
        self._header_block: tuple[int, int, bytes] | None = None
        self._header_frames = 0
        self._last_stream = 0
        self._refuses = False
        self._frame(
            _SETTINGS,
            0,
            0,
            _SETTING.pack(_INITIAL_WINDOW_SIZE, STREAM_WINDOW) + _SETTING.pack(_MAX_CONCURRENT_STREAMS, MAX_STREAMS),
        )
        self._frame(_WINDOW_UPDATE, 0, 0, (_LARGEST_WINDOW - _DEFAULT_WINDOW).to_bytes(4, "big"))

    def take_output(self) -> bytes:
        """Return what is to be sent, and forget it."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    # --- in -----------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer; raises ``ConnectionBroken`` (then ``go_away`` with its code, and close)."""
        if self._held:
            data = self._held + data
        at = 0
        if self._preface_missing:
            if not data.startswith(PREFACE[: len(data)]):
                raise ConnectionBroken(PROTOCOL_ERROR, "the peer does not speak HTTP/2")
            if len(data) < len(PREFACE):
                self._held = data
                return
            self._preface_missing = False
            at = len(PREFACE)
        end = len(data)
        unpack = _FRAME.unpack_from
        while at + _FRAME_BYTES <= end:
            high, low, kind, flags, stream_id = unpack(data, at)
            length = high << 8 | low
            if length > _SMALLEST_MAX_FRAME:
                raise ConnectionBroken(FRAME_SIZE_ERROR, "a frame is too large")
            start = at + _FRAME_BYTES
            if start + length > end:
                break
            at = start + length
            if kind == _DATA and self._header_block is None:
                self._data(stream_id & _STREAM_ID, flags, data[start:at])
            else:
                self._control(kind, flags, stream_id & _STREAM_ID, data[start:at])
        self._held = data[at:]

    def consumed(self, stream: Stream, message: bytes) -> None:
        """Note that a message has been worked off, so that its sender may send more."""
        stream.unread_bytes -= len(message)
        if stream.uncredited_bytes >= STREAM_WINDOW // 2:
            self._credit(stream)

    def _data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._uncredited_bytes += size
        if self._uncredited_bytes > _LARGEST_WINDOW // 2:
            self._frame(_WINDOW_UPDATE, 0, 0, self._uncredited_bytes.to_bytes(4, "big"))
            self._uncredited_bytes = 0
        stream = self._known(stream_id)
        if stream is None:
            return  # it was under way when the stream ended
        if stream.ended_by_peer:
            self.reset(stream, STREAM_CLOSED)
            return
        stream.uncredited_bytes += size
        if stream.uncredited_bytes > STREAM_WINDOW:
            self.reset(stream, FLOW_CONTROL_ERROR)
            return
        self._messages(stream, _unpadded(payload) if flags & _PADDED else payload)
        if flags & _END_STREAM:
            self._half_close(stream)
        elif stream.uncredited_bytes >= STREAM_WINDOW // 2:
            self._credit(stream)

    def _messages(self, stream: Stream, payload: bytes) -> None:
        """Hand out the messages that ``payload`` completes."""
        data: bytes | bytearray = payload
        if stream.partial:
            stream.partial += payload
            data = stream.partial
        at, end = 0, len(data)
        while end - at >= _PREFIX_BYTES:
            is_compressed, length = _PREFIX.unpack_from(data, at)
            if is_compressed or length > self._max_message_bytes:
                self.reset(stream, INTERNAL_ERROR)
                return
            start = at + _PREFIX_BYTES
            if start + length > end:
                break
            at = start + length
            stream.unread_bytes += length
            stream.events.message_received(bytes(data[start:at]))
            if stream.is_closed:
                return
        if data is payload:
            stream.partial += payload[at:]
        else:
            del stream.partial[:at]

    def _credit(self, stream: Stream) -> None:
        """Let the peer send more, unless its messages pile up here."""
        if stream.unread_bytes < STREAM_WINDOW and not stream.ended_by_peer and not stream.is_closed:
            self._frame(_WINDOW_UPDATE, 0, stream.id, stream.uncredited_bytes.to_bytes(4, "big"))
            stream.uncredited_bytes = 0

    def _half_close(self, stream: Stream) -> None:
        if not stream.is_closed:
            stream.ended_by_peer = True
            stream.events.half_closed()

    def _known(self, stream_id: int) -> Stream | None:
        """Return an open stream, None for one that has ended; a stream that never began breaks the connection."""
        if not stream_id & 1 or stream_id > self._last_stream:
            raise ConnectionBroken(PROTOCOL_ERROR, "a frame on a stream that was never opened")
        return self.streams.get(stream_id)

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header_block is not None and (kind != _CONTINUATION or stream_id != self._header_block[0]):
            raise ConnectionBroken(PROTOCOL_ERROR, "a header block was interrupted")
        match kind:
            case 0x1:  # HEADERS
                self._header_frames = 1
                self._headers(stream_id, flags, flags, _header_fragment(flags, payload))
            case 0x9:  # CONTINUATION
                if self._header_block is None:
                    raise ConnectionBroken(PROTOCOL_ERROR, "a header block was continued that never began")
                _, first_flags, begun = self._header_block
                self._header_frames += 1
                self._headers(stream_id, flags, first_flags, begun + payload)
            case 0x8:  # WINDOW_UPDATE
                _check_size(len(payload) == _CODE_BYTES, "WINDOW_UPDATE")
                self._window_update(stream_id, int.from_bytes(payload, "big") & _LARGEST_WINDOW)
            case 0x3:  # RST_STREAM
                _check_size(len(payload) == _CODE_BYTES, "RST_STREAM")
                self._peer_reset(self._known(stream_id))
            case 0x4:  # SETTINGS
                _check_connection_frame(stream_id)
                self._peer_settings(flags, payload)
            case 0x6:  # PING
                _check_connection_frame(stream_id)
                self._ping(flags, payload)
            case 0x5:  # PUSH_PROMISE
                raise ConnectionBroken(PROTOCOL_ERROR, "a client cannot push")
            case _:
                pass  # PRIORITY, GOAWAY and what nobody knows yet want no answer

    def _headers(self, stream_id: int, flags: int, first_flags: int, block: bytes) -> None:
        if len(block) > HEADER_BLOCK_MAX_BYTES or self._header_frames > _HEADER_BLOCK_MAX_FRAMES:
            raise ConnectionBroken(PROTOCOL_ERROR, "a header block is too large, or in too many pieces")
        if not flags & _END_HEADERS:
            self._header_block = (stream_id, first_flags, block)
            return
        self._header_block = None
        try:
            # Decoded even if nobody wants it: later blocks refer to it.
            headers: Headers = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except HPACKError as error:
            raise ConnectionBroken(COMPRESSION_ERROR, str(error)) from error
        if stream_id > self._last_stream:
            stream = self._opened(stream_id, headers)
        else:
            stream = self._known(stream_id)
            if stream is not None and stream.ended_by_peer:
                self.reset(stream, STREAM_CLOSED)
                return
        if stream is not None and first_flags & _END_STREAM:
            self._half_close(stream)

    def _opened(self, stream_id: int, headers: Headers) -> Stream | None:
        if not stream_id & 1:
            raise ConnectionBroken(PROTOCOL_ERROR, "a client's stream has an odd number")
        if self._settings_missing:
            raise ConnectionBroken(PROTOCOL_ERROR, "a stream before SETTINGS")
        self._last_stream = stream_id
        if self._refuses or len(self.streams) >= MAX_STREAMS:
            self._frame(_RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(_CODE_BYTES, "big"))
            return None
        stream = self.streams[stream_id] = Stream(stream_id, self._peer_initial_window)
        stream.events = self._open_stream(stream, headers)
        return stream

    def _peer_reset(self, stream: Stream | None) -> None:
        if stream is not None:
            self._close(stream).reset()

    def _window_update(self, stream_id: int, increment: int) -> None:
        if not increment:
            raise ConnectionBroken(PROTOCOL_ERROR, "a window was widened by nothing")
        if stream_id == 0:
            self._send_window += increment
            if self._send_window > _LARGEST_WINDOW:
                raise ConnectionBroken(FLOW_CONTROL_ERROR, "the connection's window is too large")
        elif (stream := self._known(stream_id)) is not None:
            stream.send_window += increment
            if stream.send_window > _LARGEST_WINDOW:
                self.reset(stream, FLOW_CONTROL_ERROR)
        self._send_blocked()

    def _peer_settings(self, flags: int, payload: bytes) -> None:
        if flags & _ACK:
            _check_size(not payload, "an acknowledgement of SETTINGS")
            return
        _check_size(len(payload) % _SETTING.size == 0, "SETTINGS")
        self._settings_missing = False
        for name, value in _SETTING.iter_unpack(payload):
            match name:
                case 0x4:  # INITIAL_WINDOW_SIZE counts for open streams, too
                    if value > _LARGEST_WINDOW:
                        raise ConnectionBroken(FLOW_CONTROL_ERROR, "the initial window is too large")
                    for stream in self.streams.values():
                        stream.send_window += value - self._peer_initial_window
                    self._peer_initial_window = value
                case 0x5:  # MAX_FRAME_SIZE
                    if not _SMALLEST_MAX_FRAME <= value <= _LARGEST_MAX_FRAME:
                        raise ConnectionBroken(PROTOCOL_ERROR, "no such frame size")
                    self._peer_max_frame = value
                case _:
                    pass  # HEADER_TABLE_SIZE too: we use no table
        self._frame(_SETTINGS, _ACK, 0, b"")
        self._send_blocked()

    def _ping(self, flags: int, payload: bytes) -> None:
        _check_size(len(payload) == _PING_BYTES, "PING")
        if not flags & _ACK:
            self._frame(_PING, _ACK, 0, payload)
        elif payload == _SHUTDOWN_PING and not self._refuses:
            # Whatever the peer sent before it knew of our going away is here now.
            self._refuses = True
            self.go_away(NO_ERROR)

    # --- out ----------------------------------------------------------------------------------------------------------

    def send_message(self, stream: Stream, message: bytes) -> bool:
        """Send a message; False: flow control holds some of it back, wait for ``writable`` before you send more."""
        if stream.is_closed:
            return True
        self._open_response(stream)
        length = len(message)
        size = length + _PREFIX_BYTES
        if not stream.outgoing and size <= min(self._peer_max_frame, stream.send_window, self._send_window):
            stream.send_window -= size
            self._send_window -= size
            head = _FRAME.pack(size >> 8, size & 0xFF, _DATA, 0, stream.id)
            self._out.append(head + _PREFIX.pack(0, length) + message)
            return True
        stream.outgoing.append(_PREFIX.pack(0, length) + message)
        self._send_outgoing(stream)
        if stream.outgoing:
            self._blocked[stream.id] = stream
        return not stream.outgoing

    def finish(self, stream: Stream, status: int, text: str = "") -> None:
        """End the stream with a gRPC status, once all that was sent has left."""
        if stream.is_closed:
            return
        if stream.outgoing:
            stream.status = (status, text)
            return
        self._open_response(stream)
        trailers = _encoded(("grpc-status", str(status)), ("grpc-message", text)) if status else _OK_TRAILERS
        self._frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.id, trailers)
        if not stream.ended_by_peer:
            # The answer is complete without the rest of the question (RFC 9113, 8.1).
            self._frame(_RST_STREAM, 0, stream.id, NO_ERROR.to_bytes(_CODE_BYTES, "big"))
        self._close(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """End a stream at once, and tell who serves it."""
        if not stream.is_closed:
            self._frame(_RST_STREAM, 0, stream.id, code.to_bytes(_CODE_BYTES, "big"))
            self._close(stream).reset()

    def shut_down(self) -> None:
        """Ask the peer for no more streams; those it opened before it heard of it are still served."""
        self._goaway_frame(_LARGEST_WINDOW, NO_ERROR)
        self._frame(_PING, 0, 0, _SHUTDOWN_PING)

    def go_away(self, code: int) -> None:
        """Say that this connection ends, and why."""
        self._goaway_frame(self._last_stream, code)

    def abandon(self) -> None:
        """Reset every stream, because the connection is lost."""
        for stream in list(self.streams.values()):
            self._peer_reset(stream)

    def _open_response(self, stream: Stream) -> None:
        if not stream.opened:
            stream.opened = True
            self._frame(_HEADERS, _END_HEADERS, stream.id, _RESPONSE_HEADERS)

    def _close(self, stream: Stream) -> StreamEvents:
        """Forget a stream, and return who served it."""
        stream.is_closed = True
        self.streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        events = stream.events
        # They refer to each other; left so, a request's body would stay until the garbage collector comes by.
        del stream.events
        return events

    def _send_blocked(self) -> None:
        """Send what flow control allows now, stream after stream, so that none starves."""
        blocked, self._blocked = self._blocked, {}
        for stream in blocked.values():
            if stream.is_closed:
                continue
            self._send_outgoing(stream)
            if stream.outgoing:
                self._blocked[stream.id] = stream
            elif stream.status is not None:
                self.finish(stream, *stream.status)
            else:
                stream.events.writable()

    def _send_outgoing(self, stream: Stream) -> None:
        outgoing = stream.outgoing
        while outgoing:
            room = min(stream.send_window, self._send_window, self._peer_max_frame)
            if room <= 0:
                return
            start = stream.sent_of_first
            piece = outgoing[0][start : start + room]
            stream.sent_of_first += len(piece)
            if stream.sent_of_first == len(outgoing[0]):
                stream.sent_of_first = 0
                outgoing.popleft()
            stream.send_window -= len(piece)
            self._send_window -= len(piece)
            self._frame(_DATA, 0, stream.id, piece)

    def _goaway_frame(self, last_stream: int, code: int) -> None:
        self._frame(_GOAWAY, 0, 0, last_stream.to_bytes(4, "big") + code.to_bytes(_CODE_BYTES, "big"))

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(_FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload)


def _unpadded(payload: bytes) -> bytes:
    padding = payload[0] if payload else 0
    if padding >= len(payload):
        raise ConnectionBroken(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - padding]


def _header_fragment(flags: int, payload: bytes) -> bytes:
    """Return what of a HEADERS frame is header block."""
    fragment = _unpadded(payload) if flags & _PADDED else payload
    if not flags & _PRIORITISED:
        return fragment
    _check_size(len(fragment) >= _PRIORITY_BYTES, "HEADERS")
    return fragment[_PRIORITY_BYTES:]


def _check_size(is_right: bool, what: str) -> None:  # noqa: FBT001 - a check by its nature
    if not is_right:
        raise ConnectionBroken(FRAME_SIZE_ERROR, f"{what} of a wrong size")


def _check_connection_frame(stream_id: int) -> None:
    if stream_id:
        raise ConnectionBroken(PROTOCOL_ERROR, "a frame for the whole connection on a stream")
