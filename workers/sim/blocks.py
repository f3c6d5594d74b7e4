"""A worker's KV blocks: who holds them, what lies in them, and which can serve as a cached prefix.

Blocks are handed out oldest-freed first, as vLLM does. A freed block keeps its content, and its place in the prefix
cache, until it is handed out again; that is what makes a late read of a freed block return somebody else's KV.
Every operation costs as many steps as it touches blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from workers.sim import kv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CacheKey = tuple[str, bytes]
"""A cache salt and the context after the block, had it been computed rightly. vLLM hashes tokens to the same effect:
neither looks at the KV itself, which is how wrong KV gets served to others."""


class BlockPool:
    """``block_count`` blocks of ``block_size`` slots, numbered from 1 (vLLM keeps block 0 for itself)."""

    def __init__(self, *, block_count: int, block_size: int, prefix_caching: bool) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._memory: list[kv.Memory] = [kv.EMPTY] * (block_count + 1)
        self._holders = [0] * (block_count + 1)
        self._free = OrderedDict.fromkeys(range(1, block_count + 1))
        self._key_of: dict[int, CacheKey] = {}
        self._cached: dict[CacheKey, dict[int, None]] = {}

    @property
    def free_count(self) -> int:
        """Blocks nobody holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks somebody holds, as ``vllm:kv_cache_usage_perc`` reports it (0 to 1)."""
        return 1.0 - len(self._free) / self.block_count

    def is_held(self, block: int) -> bool:
        """Tell whether anybody holds the block."""
        return self._holders[block] > 0

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, least recently freed first; raises ``ValueError`` when there are not so many."""
        if count > len(self._free):
            msg = f"{count} blocks asked for, {len(self._free)} free"
            raise ValueError(msg)
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._forget(block)
        return blocks

    def adopt(self, blocks: Iterable[int]) -> None:
        """Hold blocks found in the prefix cache, whether or not others hold them too."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. Its last blocks are handed out again first: prefixes stay cached longer."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def cached_prefix(self, keys: Iterable[CacheKey]) -> list[int]:
        """Return the blocks cached under the longest run of leading ``keys``."""
        found: list[int] = []
        for key in keys:
            blocks = self._cached.get(key)
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def cache(self, block: int, key: CacheKey) -> None:
        """Offer a full block to later requests under ``key``, without looking at what lies in it."""
        if self.prefix_caching and block not in self._key_of:
            self._key_of[block] = key
            self._cached.setdefault(key, {})[block] = None

    def read(self, blocks: Iterable[int]) -> list[kv.Memory]:
        """Return what lies in the blocks now, whoever put it there."""
        return [self._memory[block] for block in blocks]

    def load(self, block: int, memory: kv.Memory) -> None:
        """Copy a whole remote block over a local one."""
        self._memory[block] = memory

    def write(self, block: int, slot: int, context: bytes, tokens: bytes) -> None:
        """Compute ``tokens`` (packed) into a block from ``slot`` on, with ``context`` attended to before the block."""
        self._memory[block] = kv.write(self._memory[block], slot, context, tokens)

    def attend(self, block: int, context: bytes, slots: int) -> bytes:
        """Return the context after attending to the block's first ``slots`` slots."""
        return kv.attend(context, self._memory[block], slots)

    def holds(self, block: int, context: bytes, tokens: bytes) -> bool:
        """Tell whether the block starts with the right KV for ``tokens`` after ``context``."""
        return kv.holds(self._memory[block], context, tokens)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            others = self._cached[key]
            del others[block]
            if not others:
                del self._cached[key]
