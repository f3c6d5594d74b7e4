"""The receipt: what kvloop did for one request, told to the client, the access log and the counters alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How the request was served."""

    REUSED = "reused"
    """Everything the previous turn left on D was attached, and P did not compute it."""
    PARTIAL = "partial"
    """P read the proven part of it."""
    LOCAL = "local"
    """P had it in its own prefix cache, having read it back right after the previous turn."""
    COLD = "cold"
    """P got no handle: what its own cache did not have, it computed."""
    DECODE_ONLY = "decode_only"
    """D computed the prompt by itself."""
    REFUSED = "refused"
    """The client got an error from us, or P's own error passed on."""
    PASSED = "passed"
    """Not ours: forwarded as it came."""
    WATCHED = "watched"
    """Role decode: somebody else's decode leg, of which only the handle was of interest."""


class Stage(StrEnum):
    """How far a request had come when its client left. What each leaves behind: docs/handle-life.md."""

    REQUEST = "request"
    """It was still arriving, or being rendered; nothing was sent to P's engine."""
    PREFILL = "prefill"
    """P was at work, or done: what it computed waits for a D that never comes, until P's lease ends."""
    DECODE = "decode"
    """It was sent to D, which had not answered."""
    RESPONSE = "response"
    """D was answering."""


class Reason(StrEnum):
    """Why a turn did not reuse everything. One word each, a bounded set, so that they can be counted."""

    NO_CONVERSATION = "no_conversation"
    INVALID_CONVERSATION_ID = "invalid_conversation_id"
    NOTHING_KEPT = "nothing_kept"
    """First turn, or the handle was used, expired or evicted meanwhile."""
    EXPIRED = "expired"
    STORE_UNAVAILABLE = "store_unavailable"
    """The shared store did not answer in time, or is away."""
    STORE_UNREADABLE = "store_unreadable"
    """What the shared store held was not written by this version of kvloop with this secret."""
    ENGINE_GONE = "engine_gone"
    """D restarted since: its new engine has been seen at the old one's address."""
    REUSE_OFF = "reuse_off"
    NOT_BIDIRECTIONAL = "not_bidirectional"
    NON_TEXT = "non_text"
    SEVERAL_SEQUENCES = "several_sequences"
    """n > 1, best_of, beam search or a list of prompts: one handle cannot serve several sequences."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """prompt_logprobs or echo: D must compute the prompt itself to answer."""
    RENDER_FAILED = "render_failed"
    HISTORY_DIFFERS = "history_differs"
    TOO_SHORT = "too_short"
    """The proven part is below the worth of a read."""
    CANNOT_CUT = "cannot_cut"
    """Only a part is proven, and this handle cannot be cut (several block groups, context parallelism)."""
    BLOCK_SIZE_UNKNOWN = "block_size_unknown"
    """D's KV block size has not been learnt (yet), so the handle's block list cannot be checked."""
    BLOCKS_UNEXPLAINED = "blocks_unexplained"
    """The handle's block list is longer or shorter than its tokens need; P would read shifted blocks."""
    RETURN_LOST = "return_lost"
    """P had read the turn back, but its cache has lost it since, or another P got this turn."""
    READ_FAILED = "read_failed"
    """P had the handle but computed the tokens itself."""
    PREFILL_FAILED = "prefill_failed"
    PREFILL_TIMEOUT = "prefill_timeout"
    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_WITHOUT_KV = "prefill_without_kv"
    """P answered without transfer parameters: it runs no KV connector."""
    GUARD_REFUSED = "guard_refused"
    """The guard before P knows another secret than ours (KVLOOP_WORKER_SECRET)."""
    PROMPT_IDS_DIFFER = "prompt_ids_differ"
    """P prefilled other tokens than it was given; reuse is off until restart."""
    CLIENT_ERROR = "client_error"
    STREAMED_PREFILL = "streamed_prefill"
    """Role prefill: the orchestrator wants P's answer streamed, so there can be no second try behind its back."""
    NOT_PREFILL = "not_prefill"
    """Role prefill: nothing says that this request is a prefill leg."""
    OVERLOADED = "overloaded"
    """Refused at its headers, or while its body came: the gateway serves as many as it can."""


@dataclass(slots=True)
class Receipt:
    """Filled in as the request goes. Tokens are counts, times milliseconds; None means: does not apply."""

    outcome: Outcome = Outcome.PASSED
    reason: Reason | None = None
    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    held_tokens: int | None = None
    render_ms: float | None = None
    prefill_ms: float | None = None
    conversation: str | None = None
    forbidden_fields_removed: int = 0
    captured: str | None = None
    abandoned: Stage | None = None
    refused_host: str | None = None
    """The address in a handle that may not be used, and who sent it; for the log of those who run the gateway."""
    cached_tokens: int | None = None
    decode_ms: float | None = None
    """From the request's departure to D to the first piece of D's streamed answer."""
    ttft_ms: float | None = None
    """From the request's arrival to that piece."""

    def header_value(self) -> str:
        """Return the receipt as an RFC 9651 dictionary, for the response header."""
        return ", ".join(f"{key}={value}" for key, value in self._public().items())

    def metadata(self) -> dict[str, Any]:
        """Return the receipt as Envoy dynamic metadata, for the access log."""
        fields = self._public()
        if self.conversation is not None:
            fields["conversation"] = self.conversation
        if self.forbidden_fields_removed:
            fields["forbidden_fields_removed"] = self.forbidden_fields_removed
        return fields

    def _public(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"outcome": str(self.outcome)}
        if self.reason is not None:
            fields["reason"] = str(self.reason)
        numbers = {
            "reused": self.reused_tokens,
            "prompt": self.prompt_tokens,
            "held": self.held_tokens,
            # Only worth a word where P's own prefix cache took part.
            "cached": None if self.cached_tokens == self.reused_tokens else self.cached_tokens,
            "render_ms": _rounded(self.render_ms),
            "prefill_ms": _rounded(self.prefill_ms),
        }
        return fields | {key: value for key, value in numbers.items() if value is not None}


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 1)
