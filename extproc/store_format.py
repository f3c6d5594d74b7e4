"""How a kept turn is spelled in a store that other processes read: the only module that knows its keys and values.

A value is ``KVLT``, a version byte, a 16-byte seal, then the turn (all integers big-endian)::

    deadline_ms u64 · block_size u32 (0: unknown) · sequence length u64
    model u32 · handle u32 · digests u32 · tail u8      lengths; the tail's in tokens, the others' in bytes
    model, handle (D's JSON text), digests, tail (u32 each)

Rules that must stay true:

* A name or a value says nothing to a reader about who is talking: conversation, tenant and engine appear as keyed hashes.
* What was not written by us, for this conversation, with our secret, is not read: the seal covers all three.
* ``decode`` never raises, and reads no version but its own. A new field of ``StoredTurn`` means a new version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import orjson

from extproc import handle as handles
from extproc.proof import CHUNK_TOKENS, DIGEST_BYTES, Sequence
from extproc.store import StoredTurn

if TYPE_CHECKING:
    from extproc.identity import ConversationKey

VERSION: Final = 1
_MAGIC: Final = b"KVLT"
_SEAL_BYTES: Final = 16
_HEAD_BYTES: Final = len(_MAGIC) + 1
_FIELDS: Final = struct.Struct(">QIQIIIB")
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that is not to be used; ``cause`` is ``foreign``, ``other_version`` or ``damaged``."""

    cause: str


class StoreFormat:
    """Names and values for one server process, known by its ``run_id`` and history, under one shared secret (may be empty).

    Names depend on the run id, so that a handle lives and dies with the server process it was given to. A server that
    restarts from a snapshot, or a replica that takes over, may bring back handles which were taken already; under its
    own names they are never found.
    """

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"kvloop store").digest()
        self._run_id = run_id.encode()

    def turn_name(self, key: ConversationKey) -> str:
        """Name the place of a conversation's turn."""
        return "kvloop:turn:" + self._hash(b"turn", key.digest).hex()

    def engine_name(self, handle: handles.Handle) -> str:
        """Name the place that says which engine was last seen at the handle's address."""
        return "kvloop:engine:" + self._hash(b"address", f"{handle.host}:{handle.port}".encode()).hex()

    def engine_mark(self, handle: handles.Handle) -> bytes:
        """Return what stands there while the handle's engine is the one."""
        return self._hash(b"engine", handle.engine_id.encode())

    def encode(self, key: ConversationKey, turn: StoredTurn, deadline_ms: int) -> bytes:
        """Spell a turn whose deadline is ``deadline_ms`` on the server's clock; its own is left out."""
        model, sequence = turn.model.encode(), turn.sequence
        body = _FIELDS.pack(
            deadline_ms,
            turn.block_size_tokens or 0,
            sequence.length,
            len(model),
            len(turn.handle.raw),
            len(sequence.digests),
            len(sequence.tail),
        )
        tail = struct.pack(f">{len(sequence.tail)}I", *sequence.tail)
        body = b"".join((body, model, turn.handle.raw, sequence.digests, tail))
        return b"".join((_MAGIC, bytes([VERSION]), self._seal(key, body), body))

    def decode(self, key: ConversationKey, value: bytes) -> StoredTurn | Unreadable:
        """Read what ``encode`` wrote. The turn's deadline is in seconds on the server's clock: the caller converts it."""
        if value[: len(_MAGIC)] != _MAGIC or len(value) < _HEAD_BYTES + _SEAL_BYTES:
            return Unreadable("foreign")
        if value[len(_MAGIC)] != VERSION:
            return Unreadable("other_version")
        seal, body = value[_HEAD_BYTES : _HEAD_BYTES + _SEAL_BYTES], value[_HEAD_BYTES + _SEAL_BYTES :]
        if seal != self._seal(key, body):
            return Unreadable("damaged")
        return _read(body) or Unreadable("damaged")

    def _hash(self, kind: bytes, name: bytes) -> bytes:
        return blake2b(self._run_id + name, digest_size=16, key=self._key, person=kind).digest()

    def _seal(self, key: ConversationKey, body: bytes) -> bytes:
        seal = blake2b(key.digest, digest_size=_SEAL_BYTES, key=self._key, person=b"seal")
        seal.update(body)
        return seal.digest()


def _read(body: bytes) -> StoredTurn | None:
    """Read a sealed body. Without a secret anybody can seal, so what it says is checked all the same."""
    if len(body) < _FIELDS.size:
        return None
    deadline_ms, block_size, length, *sizes, tail_tokens = _FIELDS.unpack_from(body)
    parts = []
    at = _FIELDS.size
    for size in (*sizes, tail_tokens * _TOKEN_BYTES):
        parts.append(body[at : at + size])
        at += size
    model, raw, digests, tail = parts
    if at != len(body) or len(digests) != length // CHUNK_TOKENS * DIGEST_BYTES or tail_tokens != length % CHUNK_TOKENS:
        return None
    try:
        publication = handles.read_publication(raw)
        name = model.decode()
    except (handles.HandleRefused, orjson.JSONDecodeError, UnicodeDecodeError):
        return None
    sequence = Sequence(length, digests, struct.unpack(f">{tail_tokens}I", tail))
    return StoredTurn(publication.handle, sequence, block_size or None, name, deadline_ms / 1000)
