"""Repair two faults of vLLM's NIXL scheduler that cost a worker its KV blocks for good (seen on 0.32, same lines in 0.33).

1. *A failed read parks the request.* When P cannot read from D (D died, restarted, or its blocks expired), the scheduler
   starts the request over and asks the connector again what D could provide. The connector answers as the first time,
   so the request waits for a read that nobody starts any more, and when its client gives up, its blocks on P stay
   taken. The same happens to a request preempted after its read, and on a P without ``bidirectional_kv_xfer``. Here the
   connector answers "nothing" wherever no read will be started, and P computes the prompt.
2. *A turn without a prefill leg is never let go.* D keeps the blocks of every finished turn that came with
   ``kv_transfer_params``, but its worker tracks their reading and expiry only for requests it was told about at their
   start, which leaves out those with neither ``do_remote_prefill`` nor ``do_remote_decode``. Here it is told about all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Matched = Callable[[Any, Any, int], tuple[int, bool]]
    Allocated = Callable[[Any, Any, Any, int], None]

PATCHED: Final = "_kvloop_repair"


def install() -> str:
    """Wrap both methods of the scheduler's side of the pull connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (  # noqa: PLC0415 (only on a worker)
        NixlPullConnectorScheduler as Pull,
    )

    matched, allocated = computing(Pull.get_num_new_matched_tokens), tracking(Pull.update_state_after_alloc)
    Pull.get_num_new_matched_tokens = matched
    Pull.update_state_after_alloc = allocated
    return "failed reads from decode workers are computed instead; every retained turn expires"


def computing(matched: Matched) -> Matched:
    """Return ``matched(scheduler, request, computed tokens) -> (loadable tokens, asynchronously)``, corrected."""
    if getattr(matched, PATCHED, False):
        return matched

    @functools.wraps(matched)
    def corrected(scheduler: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not params.get("do_remote_prefill"):
            tried = params.get("_remote_blocks_processed")  # vLLM's own mark, set when it starts the read
            if tried or not scheduler.is_bidirectional_kv_xfer_enabled:
                return 0, False
        return matched(scheduler, request, num_computed_tokens)

    setattr(corrected, PATCHED, True)
    return corrected


def tracking(allocated: Allocated) -> Allocated:
    """Return ``allocated(scheduler, request, blocks, external tokens)`` that reports every request with parameters."""
    if getattr(allocated, PATCHED, False):
        return allocated

    @functools.wraps(allocated)
    def corrected(scheduler: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocated(scheduler, request, blocks, num_external_tokens)
        if request.kv_transfer_params and scheduler.is_bidirectional_kv_xfer_enabled:
            scheduler._reqs_in_batch.add(request.request_id)  # noqa: SLF001 (that is the fault)

    setattr(corrected, PATCHED, True)
    return corrected
