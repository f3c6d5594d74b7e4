"""One sequence's KV: which blocks hold it, and what the model attends to when it reads them.

Two contexts are carried along: the one the blocks really hold, and the one they would hold had every token been
computed rightly. As long as they agree a block costs one digest; where they part, the sequence attends to wrong KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.sim import kv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.sim.blocks import BlockPool, CacheKey


class SequenceKV:
    """Tokens and the blocks their KV lies in. ``attended`` is the context after the last computed token."""

    def __init__(self, pool: BlockPool, token_ids: Sequence[int], *, model: str, cache_salt: str) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.computed = 0
        self.attended = b""
        self.wrong = False
        self.poisoned_blocks = 0
        self._salt = cache_salt
        self._root = kv.root(model)
        self._tokens = kv.pack(token_ids)
        self._block_bytes = pool.block_size * kv.TOKEN_BYTES
        self._chain = list(self._right_contexts())
        self._context = self._right = self._root

    @property
    def length(self) -> int:
        """Tokens in the sequence, computed or not."""
        return len(self._tokens) // kv.TOKEN_BYTES

    def cached_blocks(self) -> list[int]:
        """Return the cached blocks it may adopt: never all of it, since the last token's output is wanted."""
        if not self.pool.prefix_caching:
            return []
        usable = (self.length - 1) // self.pool.block_size
        return self.pool.cached_prefix(self._key(right) for right in self._chain[:usable])

    def compute(self, trusted: int) -> int:
        """Compute all tokens but the first ``trusted``, whose KV is taken for right; return how many that was."""
        trusted = min(trusted, self.length - 1)
        self._context = self._right = self._root
        for index, block in enumerate(self.blocks):
            self._compute_block(index, block, trusted)
        self.computed = self.length
        return self.length - trusted

    def append(self, token_id: int) -> None:
        """Compute one more token. The caller has added a block to ``blocks`` if the last one was full."""
        slot = self.computed % self.pool.block_size
        token = kv.pack((token_id,))
        self._tokens += token
        self.pool.write(self.blocks[-1], slot, self._context, token)
        self.attended = self.pool.attend(self.blocks[-1], self._context, slot + 1)
        self.computed += 1
        if slot + 1 == self.pool.block_size:
            right = kv.follow(self._right, self._tokens[-self._block_bytes :])
            self._close_block(self.blocks[-1], self.attended, right)

    def _compute_block(self, index: int, block: int, trusted: int) -> None:
        size = self.pool.block_size
        tokens = self._tokens[index * self._block_bytes : (index + 1) * self._block_bytes]
        there = min(max(trusted - index * size, 0), size)
        missing = tokens[there * kv.TOKEN_BYTES :]
        if missing:
            self.pool.write(block, there, self._context, missing)
        is_full = len(tokens) == self._block_bytes
        right = self._chain[index] if is_full else kv.follow(self._right, tokens)
        if self._context == self._right and self.pool.holds(block, self._context, tokens):
            self.attended = right
        else:
            self.wrong = True
            self.attended = self.pool.attend(block, self._context, len(tokens) // kv.TOKEN_BYTES)
        if is_full:
            self._close_block(block, self.attended, right)

    def _close_block(self, block: int, context: bytes, right: bytes) -> None:
        if self.pool.prefix_caching:
            self.poisoned_blocks += context != right
            self.pool.cache(block, self._key(right))
        self._context, self._right = context, right

    def _key(self, right: bytes) -> CacheKey:
        return self._salt, right

    def _right_contexts(self) -> Iterator[bytes]:
        context = self._root
        for start in range(0, len(self._tokens) - self._block_bytes + 1, self._block_bytes):
            context = kv.follow(context, self._tokens[start : start + self._block_bytes])
            yield context
