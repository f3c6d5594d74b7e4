"""What the role ``prefill`` tells the role ``decode`` about a prompt, by way of the orchestrator between them.

The mark travels in P's transfer parameters, which every orchestrator hands to D as they are; the decode role takes it out.
It says which tokens P prefilled: D tokenises for itself, and where the two disagree (a template changed on half of the
workers, say) the KV that D holds is not that of the tokens D says, so its handle must not be kept. It also says P's host,
which some orchestrators overwrite with the address they reach P by, and the receipt of the prefill leg.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from extproc import handle as handles
from extproc import proof, splice

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK_KEY: Final = "kvloop_prompt"
_RECEIPT_MAX_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True)
class PromptMark:
    """``tokens`` long is the prompt; ``chunks`` is the last of its chained digests, ``tail`` the ids after those chunks."""

    tokens: int
    chunks: bytes
    tail: tuple[int, ...]
    host: str
    receipt: str

    def agrees(
        self, held: proof.Sequence, prompt_ids: Sequence[int] | None, end: proof.PromptEnd | None = None
    ) -> bool:
        """Tell whether D's prompt is the marked one: by its ids if D told them, else by its digests and its end.

        Digests cover whole chunks, of which the last may hold the prompt's end and generated tokens alike. Without the
        end nothing is known of those few tokens, and that is not enough.
        """
        if prompt_ids is not None:
            try:
                held, end = proof.fingerprint(prompt_ids), proof.prompt_end(prompt_ids)
            except (OverflowError, TypeError):
                return False  # what D told are no token ids
        covered = self.tokens // proof.CHUNK_TOKENS * proof.DIGEST_BYTES
        return (
            end == proof.PromptEnd(self.tokens, self.tail)
            and held.length >= self.tokens
            and held.digests[:covered][-proof.DIGEST_BYTES :] == self.chunks
        )


def put_mark(params: bytes, prompt_ids: Sequence[int], receipt: str) -> bytes:
    """Return P's transfer parameters (JSON text) with a mark of the prompt; ids as ``proof.fingerprint`` takes them."""
    sequence = proof.fingerprint(prompt_ids)
    mark = {
        "v": proof.FORMAT_VERSION,
        "tokens": sequence.length,
        "chunks": base64.b64encode(sequence.digests[-proof.DIGEST_BYTES :]).decode("ascii"),
        "tail": list(sequence.tail),
        "host": handles.remote_host(orjson.loads(params)),
        "receipt": receipt,
    }
    return _edited(params, drop={MARK_KEY}, add={MARK_KEY: orjson.dumps(mark)})


def take_mark(params: bytes) -> tuple[bytes, PromptMark | None]:
    """Return transfer parameters (JSON text of an object) as P gave them, and the mark if there is a sound one."""
    fields = orjson.loads(params)
    if MARK_KEY not in fields:
        return params, None
    params = _edited(params, drop={MARK_KEY})
    mark = _read(fields[MARK_KEY])
    if mark is not None and mark.host and handles.remote_host(fields) not in ("", mark.host):
        params = handles.with_remote_host(params, mark.host)
    return params, mark


def _read(value: Any) -> PromptMark | None:
    match value:
        case {
            "v": 1,
            "tokens": int(tokens),
            "chunks": str(chunks),
            "tail": list(tail),
            "host": str(host),
            "receipt": str(receipt),
        }:
            pass
        case _:
            return None
    try:
        digest = base64.b64decode(chunks, validate=True)
    except (binascii.Error, ValueError):
        return None
    # ``type``, not ``isinstance``: to Python, JSON's true is the integer 1.
    if any(type(number) is not int for number in (tokens, *tail)):
        return None
    whole, rest = divmod(tokens, proof.CHUNK_TOKENS)
    if tokens < 0 or len(digest) != (proof.DIGEST_BYTES if whole else 0) or len(tail) != rest:
        return None
    if not receipt.isascii() or not receipt.isprintable() or len(receipt) > _RECEIPT_MAX_CHARACTERS:
        # It becomes a header.
        return None
    return PromptMark(tokens, digest, tuple(tail), host, receipt)


def _edited(raw: bytes, **changes: Any) -> bytes:
    start = splice.object_start(raw)
    assert start is not None  # noqa: S101 - only called on text that parsed to an object
    return splice.edit(raw, start, splice.members(raw, start), **changes)
