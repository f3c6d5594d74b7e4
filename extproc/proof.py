"""Prove how much of a new prompt the decode worker's retained KV really covers.

vLLM's prefill worker never compares tokens: it copies whatever the handle points at over the start of the prompt. So the
only thing that may stand between a rewritten history and a wrong answer is this comparison, and it is made on token ids,
never on messages: chat templates rewrite history, and a tokenizer may split generated text differently than the model did.

Rules that must stay true:

* ``common_prefix`` never reports more tokens than the two sequences really share (short of a 128-bit collision).
* A ``Sequence`` costs half a byte per token, whatever the conversation's length.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Ids

CHUNK_TOKENS: Final = 32
"""Tokens under one digest. 16 bytes per 32 tokens: the memory of 8 bytes per 16, but out of reach of a birthday attack,
which matters because a tenant picks both sides of the comparison and a false match poisons P's prefix cache for all."""

DIGEST_BYTES: Final = 16
FORMAT_VERSION: Final = 1
TOKEN_ID_LIMIT: Final = 2**32


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens a decode worker holds KV for, as chained digests: digest *i* covers chunks 0..*i*.

    ``length`` is in tokens, ``digests`` holds 16 bytes per whole chunk of 32 tokens, ``tail`` the remaining token ids.
    """

    length: int
    digests: bytes
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """Where a sequence's prompt ends, which its digests do not show: ``tokens`` long, ``tail`` the ids after its chunks."""

    tokens: int
    tail: tuple[int, ...]


def fingerprint(token_ids: Ids[int]) -> Sequence:
    """Digest ``token_ids`` (each 0 <= id < 2**32); raises ``OverflowError`` or ``TypeError`` on anything else."""
    whole = len(token_ids) // CHUNK_TOKENS * CHUNK_TOKENS
    return Sequence(
        length=len(token_ids),
        digests=b"".join(_chained_digests(token_ids)),
        tail=tuple(token_ids[whole:]),
    )


def common_prefix(held: Sequence, token_ids: Ids[int]) -> int:
    """Return how many leading tokens of ``token_ids`` are proven equal to ``held``, in tokens.

    A difference inside a whole chunk is reported at that chunk's start; inside the tail, at the exact token.
    """
    proven = 0
    for index, digest in enumerate(_chained_digests(token_ids)):
        start = index * DIGEST_BYTES
        if held.digests[start : start + DIGEST_BYTES] != digest:
            break
        proven += CHUNK_TOKENS
    if proven != held.length - len(held.tail):
        return proven
    for mine, theirs in zip(held.tail, token_ids[proven:], strict=False):
        if mine != theirs:
            break
        proven += 1
    return proven


def to_json(held: Sequence) -> dict[str, Any]:
    """Spell a sequence as the value of a handle's ``kvloop_digest`` key (written by the vLLM plugin on D)."""
    return {
        "v": FORMAT_VERSION,
        "tokens": held.length,
        "chunks": base64.b64encode(held.digests).decode("ascii"),
        "tail": list(held.tail),
    }


def from_json(value: object) -> Sequence | None:
    """Read what ``to_json`` wrote; ``None`` for anything inconsistent, because half a proof is no proof."""
    match value:
        case {"v": 1 as version, "tokens": int(length), "chunks": str(chunks), "tail": list(tail)}:
            pass
        case _:
            return None
    try:
        digests = base64.b64decode(chunks, validate=True)
    except (binascii.Error, ValueError):
        return None
    # ``type``, not ``isinstance``: to Python, JSON's true is the integer 1.
    if any(type(number) is not int for number in (version, length, *tail)):
        return None
    if any(not 0 <= token < TOKEN_ID_LIMIT for token in tail):
        return None
    whole, rest = divmod(length, CHUNK_TOKENS)
    if length < 0 or len(digests) != whole * DIGEST_BYTES or len(tail) != rest:
        return None
    return Sequence(length=length, digests=digests, tail=tuple(tail))


def prompt_end(prompt_ids: Ids[int]) -> PromptEnd:
    """Return the end of a prompt, for ``PromptEnd``'s reader to compare."""
    whole = len(prompt_ids) // CHUNK_TOKENS * CHUNK_TOKENS
    return PromptEnd(len(prompt_ids), tuple(prompt_ids[whole:]))


def prompt_end_to_json(end: PromptEnd) -> dict[str, Any]:
    """Spell a prompt's end as the value of ``prompt`` in ``kvloop_digest``."""
    return {"tokens": end.tokens, "tail": list(end.tail)}


def prompt_end_from_json(value: object) -> PromptEnd | None:
    """Read what ``prompt_end_to_json`` wrote; ``None`` for anything inconsistent."""
    match value:
        case {"tokens": int(tokens), "tail": list(tail)}:
            pass
        case _:
            return None
    if any(type(number) is not int for number in (tokens, *tail)):
        return None
    if tokens < 0 or len(tail) != tokens % CHUNK_TOKENS or any(not 0 <= token < TOKEN_ID_LIMIT for token in tail):
        return None
    return PromptEnd(tokens, tuple(tail))


def _chained_digests(token_ids: Ids[int]) -> Iterator[bytes]:
    packed = memoryview(array("I", token_ids).tobytes())
    chunk_bytes = CHUNK_TOKENS * 4
    state = b""
    for start in range(0, len(packed) - chunk_bytes + 1, chunk_bytes):
        state = blake2b(state + packed[start : start + chunk_bytes], digest_size=DIGEST_BYTES).digest()
        yield state
