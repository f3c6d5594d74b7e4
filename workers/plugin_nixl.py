"""Let NIXL's progress thread sleep between polls, for machines with few cores.

NIXL's Python API fixes the delay at 0: the thread spins, a whole core per worker, which two workers on a small machine
cannot spare. 1000 us brought an idle worker from 3.0 to 0.08 s of CPU in 3 s. The thread itself must stay: without it
the reads of a peer never complete.
"""

from __future__ import annotations

import sys
from typing import Any, Final

PATCHED: Final = "_kvloop_delay"


def install(delay_microseconds: int) -> str:
    """Set the delay on every NIXL agent made from now on."""
    # Through vLLM, which sets variables that UCX reads when NIXL is first imported.
    from vllm.distributed.nixl_utils import NixlWrapper  # noqa: PLC0415 (vLLM is there only on a worker)

    if NixlWrapper is None:
        return "NIXL is not installed, nothing to calm"
    bindings = sys.modules[NixlWrapper.__module__].nixlBind  # type: ignore[attr-defined, unused-ignore]
    make_agent = bindings.nixlAgent
    if not hasattr(make_agent, PATCHED):
        bindings.nixlAgent = calmed(make_agent, delay_microseconds)
    return f"NIXL's progress thread sleeps {delay_microseconds} us between polls"


def calmed(make_agent: Any, delay_microseconds: int) -> Any:
    """Return ``make_agent(name, config)`` with the delay written into the configuration first."""

    def make_calm_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_microseconds
        return make_agent(name, config)

    setattr(make_calm_agent, PATCHED, True)
    return make_calm_agent
