"""What ``/debug/state`` tells of a running gateway: its engines, the conversations kept, the turns that ended last.

Conversations are hashes, as everywhere; there is no prompt, no block id and no tenant in it. It is a picture for people
and for ``kvloop top``, not an interface to build on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.pool import PoolKnowledge
    from extproc.receipt import Receipt
    from extproc.settings import GatewaySettings
    from extproc.store import MemoryStore


def snapshot(
    settings: GatewaySettings,
    pool: PoolKnowledge,
    store: MemoryStore,
    recent: Iterable[tuple[float, Receipt]],
    *,
    now: float,
    limit: int,
) -> dict[str, Any]:
    """Describe the gateway at ``now`` (monotonic seconds), with ``limit`` conversations and turns at most, newest first."""
    lifetime = settings.handle_ttl_seconds - settings.handle_margin_seconds
    engines = {engine.engine_id: engine for engine in store.engines()}
    return {
        "kept_turns": len(store),
        "store_bytes": store.size_bytes,
        "prompt_ids_differed": pool.prompt_ids_differed,
        "engines": [
            {
                "address": engine.address,
                "kept_turns": engine.turns,
                "retained_tokens": engine.tokens,
                "block_size_tokens": pool.block_size_tokens(engine.engine_id),
            }
            for engine in engines.values()
        ],
        "conversations": [
            {
                "conversation": str(key),
                "engine": f"{turn.handle.host}:{turn.handle.port}",
                "model": turn.model,
                "tokens": turn.handle.tokens,
                "age_seconds": round(now - (turn.deadline - lifetime), 1),
                "expires_in_seconds": round(turn.deadline - now, 1),
            }
            for key, turn in store.newest(limit)
        ],
        "turns": [_turn(now - at, receipt) for at, receipt in list(recent)[: -limit - 1 : -1]],
    }


def _turn(age_seconds: float, receipt: Receipt) -> dict[str, Any]:
    timed = {"decode_ms": receipt.decode_ms, "ttft_ms": receipt.ttft_ms}
    return {
        "age_seconds": round(age_seconds, 1),
        **receipt.metadata(),
        **{key: round(milliseconds, 1) for key, milliseconds in timed.items() if milliseconds is not None},
    }
