"""Keep Python's garbage collector from stopping the event loop.

A full collection looks at every object there is: 50 ms for what kvloop imports, 310 ms with 100,000 kept conversations
(docs/performance.md), and all streams wait. What has survived once is therefore set aside (``gc.freeze``) and not looked at
again; what has come since is little. Set aside, objects still go the moment nothing refers to them, and requests leave no
cycles behind. For cycles that do get set aside (a closed connection of the admin port, say) everything is looked at once in
a long while.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Final

_INTERVAL_SECONDS: Final = 1.0
_FULL_EVERY: Final = 3600
"""Intervals between two collections that look at everything."""


async def keep_collections_short() -> None:
    """Collect what is new, again and again, until cancelled."""
    for number in itertools.count(1):
        collect(everything=number % _FULL_EVERY == 0)
        await asyncio.sleep(_INTERVAL_SECONDS)


def collect(*, everything: bool = False) -> None:
    """Collect what came since the last time, or all there is, and set the survivors aside."""
    if everything:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
