"""D's handle: the ``kv_transfer_params`` that say where a finished turn's KV lies. The only module that spells its keys.

Rules that must stay true:

* A handle is opaque. Every key goes to P byte for byte, except the two a partial proof cuts.
* A handle is used at most once: D frees the blocks at the first read, and a second read returns whatever lies there then.
* P reads ``min(remote_num_tokens, prompt tokens)`` tokens without comparing anything, so what leaves this module must
  never claim more tokens than were proven, and the prompt must be longer than what it claims.

Source: vLLM 0.32/0.33, ``nixl/pull_scheduler.py``, ``request_finished`` and ``get_num_new_matched_tokens``.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from extproc import proof, splice

DIGEST_KEY: Final = "kvloop_digest"
PROMPT_IDS_KEY: Final = "prompt_token_ids"
_CACHED_TOKENS_KEY: Final = "remote_prefill_cached_tokens"
_BLOCK_SIZE_KEY: Final = "block_size"
_PROMPT_KEY: Final = "prompt"
_RELEASED_TOKENS: Final = 0
_BLOCK_SIZE_LIMIT: Final = 2**32

COLD_PREFILL: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
"""Transfer parameters of a prefill leg without a handle: compute, then hold the KV for a D to read."""

DECODE_ALONE: Final = b'{"do_remote_decode":false,"do_remote_prefill":false}'
"""Transfer parameters of a decode-only turn: nothing to read, but publish a handle when done.

Only for a D with our plugin. A stock D (0.32, 0.33) publishes the handle but never frees those blocks, not even when they
are read or their time is over: its worker was not told of the request at its start.
"""


REFERENCE_KEYS: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")


class HandleRefused(Exception):
    """These transfer parameters are not a handle kvloop may keep. ``reason`` is a word for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Handle:
    """A checked handle. ``raw`` is D's JSON text without ``kvloop_digest``; ``tokens`` is how many it covers."""

    raw: bytes
    engine_id: str
    host: str
    port: int
    tokens: int
    blocks_per_group: tuple[int, ...]
    tokens_per_block_may_vary: bool

    @property
    def is_loopback(self) -> bool:
        """Whether D gave an address that means "this machine", which on any other machine is the wrong one."""
        host = self.host.lower().strip("[]").removesuffix(".")
        if host in ("", "localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified


@dataclass(frozen=True, slots=True)
class Publication:
    """What D's last message said: the handle and, with our plugin on D, the tokens behind it and its block size."""

    handle: Handle
    sequence: proof.Sequence | None
    block_size_tokens: int | None
    prompt_end: proof.PromptEnd | None = None


def read_publication(raw: bytes) -> Publication:
    """Check D's ``kv_transfer_params``, given as JSON text; raises ``HandleRefused``."""
    params = orjson.loads(raw)
    if not isinstance(params, dict):
        raise HandleRefused("not_an_object")
    digest = params.get(DIGEST_KEY)
    if DIGEST_KEY in params:
        raw = _edited(raw, drop={DIGEST_KEY})
    handle = _checked(raw, params)
    sequence = proof.from_json(digest)
    block_size = digest.get(_BLOCK_SIZE_KEY) if isinstance(digest, dict) else None
    if type(block_size) is not int or not 0 < block_size < _BLOCK_SIZE_LIMIT:
        block_size = None
    end = proof.prompt_end_from_json(digest.get(_PROMPT_KEY)) if isinstance(digest, dict) else None
    return Publication(handle, sequence, block_size, end)


def _checked(raw: bytes, params: dict[str, Any]) -> Handle:
    if params.get("do_remote_decode") is not True or params.get("do_remote_prefill") is not False:
        raise HandleRefused("not_for_prefill")
    if params.get("transfer_mode", "pull") != "pull":
        raise HandleRefused("push_mode")
    match params:
        case {
            "remote_block_ids": list(groups),
            "remote_engine_id": str(engine_id),
            "remote_request_id": str(),
            "remote_host": str(host),
            "remote_port": int(port),
            "remote_num_tokens": int(tokens),
        } if engine_id and groups and all(isinstance(group, list) for group in groups):
            pass
        case _:
            raise HandleRefused("incomplete")
    if tokens < 1 or not any(groups):
        raise HandleRefused("empty")
    return Handle(
        raw=raw,
        engine_id=engine_id,
        host=host,
        port=port,
        tokens=tokens,
        blocks_per_group=tuple(len(group) for group in groups),
        # Decode context parallelism spreads a block's tokens over ranks; then block counts say nothing simple.
        tokens_per_block_may_vary=params.get("dcp_size", 1) not in (1, None),
    )


def attach_whole(handle: Handle) -> bytes:
    """Transfer parameters that let P read everything the handle covers."""
    return handle.raw


def attach_cut(handle: Handle, blocks: int, block_size_tokens: int) -> bytes:
    """Transfer parameters that let P read the first ``blocks`` whole blocks and no more (single-group handles only)."""
    groups = orjson.loads(handle.raw)["remote_block_ids"]
    cut = orjson.dumps([group[:blocks] for group in groups])
    tokens = orjson.dumps(blocks * block_size_tokens)
    return _edited(handle.raw, put={"remote_block_ids": cut, "remote_num_tokens": tokens})


def has_countable_blocks(handle: Handle) -> bool:
    """Tell whether token positions map to blocks in the simple way: one group, every block equally long."""
    return len(handle.blocks_per_group) == 1 and not handle.tokens_per_block_may_vary


def blocks_cover_tokens(handle: Handle, block_size_tokens: int) -> bool:
    """Tell whether the handle lists exactly the blocks its tokens need (countable blocks only).

    P takes what it needs from the *end* of the list, so one block more than needed would shift every token.
    """
    return -(-handle.tokens // block_size_tokens) == handle.blocks_per_group[0]


def release_params(handle: Handle) -> bytes:
    """Transfer parameters that make P read nothing and tell D to free the blocks (measured on stock vLLM)."""
    return _edited(handle.raw, put={"remote_num_tokens": orjson.dumps(_RELEASED_TOKENS)})


def with_prompt_ids(params: bytes, token_ids: bytes) -> bytes:
    """Add the prompt's token ids (JSON text), so that vLLM prefills exactly what was proven and tokenises nothing."""
    return _edited(params, drop={PROMPT_IDS_KEY}, add={PROMPT_IDS_KEY: token_ids})


def cached_tokens(prefill_params: dict[str, Any]) -> int | None:
    """How many prompt tokens P says it did not compute itself; None when it does not say."""
    value = prefill_params.get(_CACHED_TOKENS_KEY)
    return value if type(value) is int else None


def is_for_prefill(params: object) -> bool:
    """Tell whether transfer parameters are a prefill leg's, or a handle for one, and not those of another protocol."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def names_remote_kv(params: dict[str, Any]) -> bool:
    """Tell whether a prefill leg's transfer parameters point at somebody's KV; orchestrators spell "no" as null."""
    return any(params.get(key) is not None for key in REFERENCE_KEYS)


def origin(params: dict[str, Any]) -> tuple[str, str] | None:
    """Return the engine and request ids that together name one handle; None if either is missing."""
    match params:
        case {"remote_engine_id": str(engine_id), "remote_request_id": str(request_id)} if engine_id and request_id:
            return engine_id, request_id
        case _:
            return None


def without_digest(params: bytes) -> bytes:
    """Return D's transfer parameters as a D without our plugin would publish them."""
    return _edited(params, drop={DIGEST_KEY})


def remote_host(params: dict[str, Any]) -> str:
    """Return the host whose KV these parameters point at; empty when they do not say."""
    host = params.get("remote_host")
    return host if isinstance(host, str) else ""


def with_remote_host(params: bytes, host: str) -> bytes:
    """Return transfer parameters that point at another host."""
    return _edited(params, put={"remote_host": orjson.dumps(host)})


def is_for_decode(prefill_params: object) -> bool:
    """Tell whether P's answer carries KV that a D can read."""
    return isinstance(prefill_params, dict) and prefill_params.get("do_remote_prefill") is True


def _edited(raw: bytes, **changes: Any) -> bytes:
    start = splice.object_start(raw)
    assert start is not None  # noqa: S101 - only called on text that parsed to an object
    return splice.edit(raw, start, splice.members(raw, start), **changes)
