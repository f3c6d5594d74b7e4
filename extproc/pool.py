"""What the gateway has learnt about the worker pools; shared by all exchanges of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_MAX_ENGINES: Final = 10_000
"""Engine ids are new at every worker start; beyond this many, the oldest are forgotten."""


@dataclass(slots=True)
class PoolKnowledge:
    """Mutable, belongs to one event loop.

    ``digest_seen``: D's last handle carried our plugin's digest, so token ids need not be asked for.
    ``stock_seen``: some D's handle did not, so not every D is known to have the plugin.
    ``prompt_ids_differed``: a P prefilled other tokens than it was told; nothing is attached until restart.
    ``draining_engines``: ids of decode engines about to stop; what they retain is released, not kept.
    """

    digest_seen: bool = False
    stock_seen: bool = False
    prompt_ids_differed: bool = False
    draining_engines: set[str] = field(default_factory=set)
    _block_sizes: dict[str, int] = field(default_factory=dict)

    @property
    def plugin_everywhere(self) -> bool:
        """Whether every D seen so far has our plugin."""
        return self.digest_seen and not self.stock_seen

    def note_handle(self, *, has_digest: bool) -> None:
        """Learn from a handle what the D behind it can do."""
        self.digest_seen = has_digest
        self.stock_seen |= not has_digest

    def block_size_tokens(self, engine_id: str) -> int | None:
        """Return the engine's KV block size in tokens, None while unknown."""
        return self._block_sizes.get(engine_id)

    def learn_block_size(self, engine_id: str, tokens: int) -> None:
        """Remember an engine's KV block size."""
        if engine_id not in self._block_sizes and len(self._block_sizes) >= _MAX_ENGINES:
            del self._block_sizes[next(iter(self._block_sizes))]
        self._block_sizes[engine_id] = tokens
