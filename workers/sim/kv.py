"""What lies in the slots of one KV block, exactly enough to tell right KV from wrong.

The KV of a token depends on the token and on everything it attended to. A ``Run`` stands for slots computed one after
another: a digest of all that was attended to before its first token, then the tokens. Two runs with equal fields hold
equal KV; anything else holds different KV (short of a 128-bit collision).

Rules that must stay true:

* Writing replaces only the slots written. What a former owner left behind in later slots stays readable.
* The digest of a context is a function of the KV in it alone, whichever worker computed, copied or cached that KV.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4
_AT_SLOT_0: Final = bytes(4)


@dataclass(frozen=True, slots=True)
class Run:
    """KV computed token after token. It still occupies the slots from ``begin`` to ``end`` (exclusive).

    ``base`` is the slot of the first token in ``tokens`` (packed, 4 bytes each); slots before ``begin`` have since been
    overwritten, but the tokens that stood there still decide the KV of the later ones. ``context`` is the digest of
    everything attended to before ``base``.
    """

    begin: int
    base: int
    context: bytes
    tokens: bytes

    @property
    def end(self) -> int:
        """Return the slot after the last one."""
        return self.base + len(self.tokens) // TOKEN_BYTES

    def before(self, slot: int) -> Run:
        """Return the part of the run that lies before ``slot``."""
        return Run(self.begin, self.base, self.context, self.tokens[: (slot - self.base) * TOKEN_BYTES])

    def starts_with(self, other: Run) -> bool:
        """Tell whether this run's KV begins with the other's."""
        return self.base == other.base and self.context == other.context and self.tokens.startswith(other.tokens)


Memory = tuple[Run, ...]
"""One block: runs in slot order, never overlapping. Slots no run covers were never written."""

EMPTY: Final[Memory] = ()


def pack(token_ids: Sequence[int]) -> bytes:
    """Pack token ids, 4 bytes each."""
    return array("I", token_ids).tobytes()


def root(model: str) -> bytes:
    """Return the context of a sequence's first token: KV depends on the model (or LoRA) and on nothing else yet."""
    return blake2b(model.encode(), digest_size=DIGEST_BYTES).digest()


def follow(context: bytes, tokens: bytes) -> bytes:
    """Return the context after a block that holds just ``tokens``, computed in order after ``context``."""
    slots = len(tokens) // TOKEN_BYTES
    return blake2b(context + slots.to_bytes(2) + _AT_SLOT_0 + context + tokens, digest_size=DIGEST_BYTES).digest()


def attend(context: bytes, memory: Memory, slots: int) -> bytes:
    """Return the context after attending to the first ``slots`` slots of a block, whatever lies in them."""
    parts = [context, slots.to_bytes(2)]
    for run in memory:
        if run.begin >= slots:
            break
        seen = run if run.end <= slots else run.before(slots)
        parts += (seen.begin.to_bytes(2), seen.base.to_bytes(2), seen.context, seen.tokens)
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def holds(memory: Memory, context: bytes, tokens: bytes) -> bool:
    """Tell whether a block starts with exactly the KV that computing ``tokens`` after ``context`` would put there."""
    return bool(memory) and memory[0].begin == 0 and memory[0].starts_with(Run(0, 0, context, tokens))


def write(memory: Memory, slot: int, context: bytes, tokens: bytes) -> Memory:
    """Compute ``tokens`` into the slots from ``slot`` on, attending to the slots before it and to ``context``.

    ``context`` is the digest of everything before the *block*.
    """
    kept = [run if run.end <= slot else run.before(slot) for run in memory if run.begin < slot]
    last = kept[-1] if kept else None
    if last is not None and last.begin == last.base and last.end == slot and _grows(last, context, kept):
        kept.pop()
        written = Run(last.begin, last.base, last.context, last.tokens + tokens)
    else:
        written = Run(slot, slot, attend(context, tuple(kept), slot) if slot else context, tokens)
    end = slot + len(tokens) // TOKEN_BYTES
    return _joined([*kept, written, *_after(memory, end)])


def _grows(last: Run, context: bytes, runs: Sequence[Run]) -> bool:
    """Tell whether the last run was computed right here: only then is the next token one more of the same run."""
    return last.context == (attend(context, tuple(runs[:-1]), last.base) if last.base else context)


def _after(memory: Memory, slot: int) -> list[Run]:
    return [
        run if run.begin >= slot else Run(slot, run.base, run.context, run.tokens) for run in memory if run.end > slot
    ]


def _joined(runs: list[Run]) -> Memory:
    """Join neighbours that are one computation: old slots behind new ones may hold just what would be written next."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.end == run.begin and run.starts_with(last):
            joined[-1] = Run(last.begin, run.base, run.context, run.tokens)
        else:
            joined.append(run)
    return tuple(joined)
