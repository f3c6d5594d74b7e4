"""What Envoy told us and what we ask of the world: the vocabulary between the pure exchange and its shells.

Times are seconds of a monotonic clock, read once by the shell when a message arrives. Wall clocks play no part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.handle import Handle
    from extproc.identity import ConversationKey
    from extproc.store import StoredTurn

Headers = tuple[tuple[str, str], ...]
"""Header names in lower case with their values, in the order Envoy sent them; names may repeat."""


def header(headers: Headers, name: str) -> str | None:
    """Return the first value of ``name`` (lower case), or None."""
    return next((value for key, value in headers if key == name), None)


# --- from Envoy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The request's headers, pseudo headers included."""

    headers: Headers
    end_of_stream: bool
    at: float


@dataclass(frozen=True, slots=True)
class RequestBody:
    """The next piece of the request's body; may be empty at the end."""

    data: bytes
    end_of_stream: bool
    at: float


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The request's trailers, which end it in place of ``end_of_stream``."""

    at: float


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """``upstream_address`` is the worker's ``ip:port``; None when Envoy answered by itself."""

    headers: Headers
    end_of_stream: bool
    at: float
    upstream_address: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """The next chunk of the response's body, as the network cut it."""

    data: bytes
    end_of_stream: bool
    at: float


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The response's trailers."""

    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Envoy closed the stream, cleanly or not: to a finished exchange both are normal."""

    at: float


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers | Ended


# --- answers to Envoy -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Answer the held request headers, then send ``body`` on (None: the request has none)."""

    body: bytes | None
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    had_trailers: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request ourselves, with this status and body, verbatim."""

    status: int
    body: bytes
    headers: Headers = (("content-type", "application/json"),)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForwardResponseHeaders:
    """Let the response headers go. ``watch`` keeps the body coming to us; otherwise Envoy streams it alone."""

    watch: bool
    set_headers: Headers = ()
    remove_headers: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForwardChunk:
    """Let the response chunk go; ``data`` replaces it unless None, which means: exactly as it came."""

    data: bytes | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForwardTrailers:
    """Let response trailers go."""


Answer = ForwardRequest | Reply | ForwardResponseHeaders | ForwardChunk | ForwardTrailers


# --- asked of the shell ---------------------------------------------------------------------------------------------


class Leg(StrEnum):
    """Which of our own calls to a worker this is; also the value of the leg header."""

    RENDER = "render"
    PREFILL = "prefill"
    RELEASE = "release"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for Envoy's next message. Result: an ``Event``."""


@dataclass(frozen=True, slots=True)
class Take:
    """Remove and return what is kept for the conversation.

    Result: ``StoredTurn``, ``ReturnedTurn``, None, or the ``Reason`` why it cannot be had.
    """

    key: ConversationKey


@dataclass(frozen=True, slots=True)
class Returning:
    """How to have P read a kept turn back right away: the leg's body, and the proven tokens attached in it."""

    body: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep this turn for the conversation. Result: its fate, ``kept`` or a word for what became of it.

    Whatever it displaces is released by the shell. ``kind`` says whose habits tell when the conversation will come back
    (see ``gaps``); ``upstream_address`` is D's.
    """

    key: ConversationKey
    turn: StoredTurn
    kind: str = ""
    upstream_address: str | None = None
    returning: Returning | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Give back a taken turn whose handle was never sent, unless something newer is kept by now. No result."""

    key: ConversationKey
    turn: StoredTurn
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Tell D, in the background, that nobody will read this handle. No result.

    ``after_seconds``: not before then, because a P that was sent it may still be reading.
    """

    handle: Handle
    model: str
    reason: str
    after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LearnBlockSize:
    """Find out, in the background, the KV block size of the engine behind ``upstream_address``. No result."""

    engine_id: str
    upstream_address: str


@dataclass(frozen=True, slots=True)
class Call:
    """POST ``body`` to a prefill worker. Result: ``LegResult``."""

    leg: Leg
    path: str
    headers: Headers
    body: bytes
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class LegResult:
    """``status`` is 0 when no worker's answer came; ``error`` then says ``timeout``, ``unreachable`` or ``guard_refused``.

    The last: the guard before the worker knows another secret than ours, which is no client's to mend.
    """

    status: int
    body: bytes
    at: float
    elapsed_seconds: float
    content_type: str = "application/json"
    upstream: str = ""
    error: str = ""


Effect = Answer | Receive | Take | Keep | Restore | Release | LearnBlockSize | Call
