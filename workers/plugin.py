"""The vLLM plugin: small changes to a running worker, each switched by an environment variable.

vLLM calls ``register`` in the API server, the engine and every worker process (entry point ``vllm.general_plugins``).

=============================  =========  ==============================================================================
variable                       default    what it does
=============================  =========  ==============================================================================
KVLOOP_PLUGIN_STREAM_HANDLE    ``1``      puts ``kv_transfer_params`` on the finish chunk of streams (``plugin_stream``),
                                          where vLLM does not do so itself (before 0.33)
KVLOOP_PLUGIN_DIGEST           ``1``      adds ``kvloop_digest`` to the handles of decode workers (``plugin_digest``)
KVLOOP_PLUGIN_REPAIR           ``1``      mends two faults that cost workers KV blocks for good (``plugin_repair``)
KVLOOP_PLUGIN_CALM_NIXL        ``0``      microseconds NIXL's progress thread sleeps between polls (``plugin_nixl``);
                                          0 keeps NIXL's own: none, a whole core per worker
KVLOOP_WORKER_SECRET           unset      the guard's secret (``guard``), installed with vLLM's ``--middleware``
=============================  =========  ==============================================================================

The defaults touch nothing on a worker that takes no part in KV transfer. A change that does not fit the running vLLM is
left out with one log line: an unpatched worker is slower, a crashed one is an outage.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Final

from workers import guard, plugin_digest, plugin_nixl, plugin_repair, plugin_stream

if TYPE_CHECKING:
    from collections.abc import Callable

# vLLM configures the "vllm" logger and its children only.
log: Final = logging.getLogger("vllm.plugins.kvloop")

PARTS: Final[dict[str, Callable[[], str]]] = {
    "KVLOOP_PLUGIN_STREAM_HANDLE": plugin_stream.install,
    "KVLOOP_PLUGIN_DIGEST": plugin_digest.install,
    "KVLOOP_PLUGIN_REPAIR": plugin_repair.install,
}
CALM_NIXL: Final = "KVLOOP_PLUGIN_CALM_NIXL"


def register() -> None:
    """Apply every part that is switched on. Never raises; may be called again in the same process."""
    for part, install in PARTS.items():
        if os.environ.get(part, "1") != "0":
            _apply(part, install)
    if (delay := os.environ.get(CALM_NIXL, "0")) != "0":
        _apply(CALM_NIXL, lambda: plugin_nixl.install(int(delay)))
    if os.environ.get(guard.SECRET_VARIABLE) and not any("workers.guard" in word for word in sys.argv):
        log.warning("%s guards nothing without --middleware %s", guard.SECRET_VARIABLE, guard.PATH)


def _apply(part: str, install: Callable[[], str]) -> None:
    try:
        log.info("kvloop plugin: %s", install())
    except Exception as error:  # noqa: BLE001 (whatever another vLLM version makes of our assumptions)
        log.warning("kvloop plugin: %s does not fit this vLLM and is off: %r", part, error)
