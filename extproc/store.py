"""What is kept between turns: one handle per conversation, taken at most once, gone in time.

``MemoryStore`` is pure: it reads no clock. Its order of insertion stands for its order of expiry, because every turn lives
equally long but for the time its answer took, so each operation costs the same with ten conversations as with a hundred
thousand. A turn may thus be cleared a little after its deadline; whoever takes one checks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.handle import Handle
    from extproc.identity import ConversationKey
    from extproc.proof import Sequence

_ENTRY_OVERHEAD_BYTES: Final = 1200
"""Measured cost of an entry besides its handle's and digests' bytes: objects, dict slots, short strings, tail tokens."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A finished turn: where its KV lies, which tokens it covers, until when (monotonic seconds) it may be used."""

    handle: Handle
    sequence: Sequence
    block_size_tokens: int | None
    model: str
    deadline: float

    @property
    def size_bytes(self) -> int:
        """Memory the turn costs, close enough to bound the store."""
        return len(self.handle.raw) + len(self.sequence.digests) + _ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class ReturnedTurn:
    """A turn whose KV P has read back already: the tokens behind it, and how many of them were attached."""

    sequence: Sequence
    tokens: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A turn that will not be used, and why: see ``reason``.

    ``superseded``, ``evicted``, ``expired``, ``over_budget``, ``ended``, ``engine_gone``, ``engine_draining`` or
    ``draining``; of a shared store also ``store_unavailable``, ``store_refused``, ``abandoned`` (taken for a client who had
    left) or ``unacknowledged`` (kept or not: no answer came).
    """

    turn: StoredTurn
    reason: str
    key: ConversationKey | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one decode engine holds for kept turns. ``address`` is its side channel's ``host:port``."""

    engine_id: str
    address: str
    turns: int
    tokens: int


KEPT: Final = "kept"
NOT_RELEASED: Final = frozenset({"engine_gone", "unacknowledged"})
"""Nobody is left to free these turns' blocks, or somebody may yet use them."""


def fate(turn: StoredTurn, dropped: list[Dropped]) -> str:
    """Return what became of a turn a store was to keep: ``kept``, or why it was dropped."""
    return next((drop.reason for drop in dropped if drop.turn is turn), KEPT)


class MemoryStore:
    """Handles by conversation, bounded in entries and bytes. Not thread-safe: it belongs to one event loop."""

    def __init__(self, *, max_conversations: int, max_bytes: int) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._turns: OrderedDict[ConversationKey, StoredTurn] = OrderedDict()
        self._keys_by_engine: dict[str, dict[ConversationKey, None]] = {}
        self._tokens_by_engine: dict[str, int] = {}
        self._engine_at: dict[tuple[str, int], str] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def size_bytes(self) -> int:
        """Memory all kept turns cost, by ``StoredTurn.size_bytes``."""
        return self._bytes

    def newest(self, limit: int) -> list[tuple[ConversationKey, StoredTurn]]:
        """Return the turns kept last, the newest first."""
        return list(islice(reversed(self._turns.items()), limit))

    def engines(self) -> list[EngineShare]:
        """Return what each engine holds; those that hold nothing are left out."""
        shares: list[EngineShare] = []
        for engine_id, keys in self._keys_by_engine.items():
            handle = self._turns[next(iter(keys))].handle
            address = f"{handle.host}:{handle.port}"
            shares.append(EngineShare(engine_id, address, len(keys), self._tokens_by_engine[engine_id]))
        return shares

    def take(self, key: ConversationKey) -> StoredTurn | None:
        """Remove and return the conversation's turn, if any. Whoever takes it checks its deadline before use."""
        return self._remove(key)

    def put(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped]:
        """Keep ``turn``, and return every turn that had to make room for it.

        A new engine id at a known address means that D restarted: whatever the old engine held is gone with it.
        """
        dropped = self._drop_predecessor(turn.handle)
        previous = self._remove(key)
        if previous is not None:
            dropped.append(Dropped(previous, "superseded"))
        if turn.size_bytes > self._max_bytes:
            # It would push out all others, and then itself.
            return [*dropped, Dropped(turn, "evicted")]
        self._turns[key] = turn
        engine_id = turn.handle.engine_id
        self._keys_by_engine.setdefault(engine_id, {})[key] = None
        self._tokens_by_engine[engine_id] = self._tokens_by_engine.get(engine_id, 0) + turn.handle.tokens
        self._bytes += turn.size_bytes
        while len(self._turns) > self._max_conversations or self._bytes > self._max_bytes:
            dropped.append(self._drop_oldest("evicted"))
        return dropped

    def restore(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped]:
        """Keep a taken turn again, and return what had to make room, or the turn itself if its place is lost.

        It counts as newly inserted, so it may be cleared later than its deadline, at most by a turn's life.
        """
        handle = turn.handle
        if self._engine_at.get((handle.host, handle.port), handle.engine_id) != handle.engine_id:
            return [Dropped(turn, "engine_gone")]
        if key in self._turns:
            return [Dropped(turn, "superseded")]
        return self.put(key, turn)

    def expire(self, now: float) -> list[Dropped]:
        """Remove every turn whose deadline has come."""
        dropped: list[Dropped] = []
        while self._turns and next(iter(self._turns.values())).deadline <= now:
            dropped.append(self._drop_oldest("expired"))
        return dropped

    def discard_engine(self, engine_id: str, reason: str = "engine_gone") -> list[Dropped]:
        """Remove every turn an engine holds, because the engine is gone or about to go."""
        keys = list(self._keys_by_engine.get(engine_id, ()))
        return [Dropped(turn, reason, key) for key in keys if (turn := self._remove(key)) is not None]

    def find_engines(self, name: str) -> list[str]:
        """Return the ids of engines known by ``name``: an engine id, or the ``host`` or ``host:port`` of their handles."""
        return [
            engine_id
            for (host, port), engine_id in self._engine_at.items()
            if name in (engine_id, host, f"{host}:{port}")
        ]

    def drain(self) -> list[Dropped]:
        """Remove everything, because the gateway stops."""
        return [self._drop_oldest("draining") for _ in range(len(self._turns))]

    def _drop_predecessor(self, handle: Handle) -> list[Dropped]:
        address = (handle.host, handle.port)
        previous_engine = self._engine_at.get(address)
        self._engine_at[address] = handle.engine_id
        if previous_engine is None or previous_engine == handle.engine_id:
            return []
        return self.discard_engine(previous_engine)

    def _drop_oldest(self, reason: str) -> Dropped:
        key = next(iter(self._turns))
        turn = self._remove(key)
        assert turn is not None  # noqa: S101 - the key was just read
        return Dropped(turn, reason, key)

    def _remove(self, key: ConversationKey) -> StoredTurn | None:
        turn = self._turns.pop(key, None)
        if turn is None:
            return None
        self._bytes -= turn.size_bytes
        engine_id = turn.handle.engine_id
        keys = self._keys_by_engine[engine_id]
        keys.pop(key, None)
        self._tokens_by_engine[engine_id] -= turn.handle.tokens
        if not keys:
            del self._keys_by_engine[engine_id], self._tokens_by_engine[engine_id]
        return turn
