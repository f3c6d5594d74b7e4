"""Let a decode worker say which tokens its retained KV stands for: one more key, ``kvloop_digest``, in its handles.

Without it the gateway has to ask for every generated token id and take it out of the stream again. The digest is made
where the tokens are certain, in the scheduler, from the very sequence the KV was computed for, when a turn's blocks are
put aside. It costs about 1 us per 32 tokens, once per turn, in the engine's loop.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from extproc.proof import fingerprint, prompt_end, prompt_end_to_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Finished = Callable[[Any, Any], tuple[bool, dict[str, Any] | None]]

KEY: Final = "kvloop_digest"
log: Final = logging.getLogger("vllm.plugins.kvloop")
PATCHED: Final = "_kvloop_digest"


def install() -> str:
    """Wrap the scheduler's call into the KV connector at a request's end, the one place that makes handles."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 (vLLM is there only on a worker)

    Scheduler._connector_finished = wrapped(Scheduler._connector_finished)  # noqa: SLF001 (no public hook sees both)
    return "decode handles carry kvloop_digest"


def wrapped(finished: Finished) -> Finished:
    """Return ``finished(scheduler, request) -> (keep blocks, handle)`` with the digest added to a D's handle."""
    if getattr(finished, PATCHED, False):
        return finished

    @functools.wraps(finished)
    def with_digest(scheduler: Any, request: Any) -> tuple[bool, dict[str, Any] | None]:
        keep, handle = finished(scheduler, request)
        try:
            if handle and tokens_identify(request):
                add_digest(handle, request.all_token_ids, block_size_tokens(scheduler), request.num_prompt_tokens)
        except (AttributeError, TypeError, OverflowError) as error:
            _warn_once(type(error).__name__, str(error))
        return keep, handle

    setattr(with_digest, PATCHED, True)
    return with_digest


def add_digest(
    handle: dict[str, Any], all_token_ids: Sequence[int], block_size: int | None, prompt_tokens: int
) -> None:
    """Add the digest of the first ``remote_num_tokens`` tokens to a D's handle; leave a P's alone.

    Shape: ``extproc.proof.to_json`` plus ``prompt``, where the prompt ends (``prompt_end_to_json``), and ``block_size``,
    D's KV block size in tokens (left out where one handle block does not simply hold that many consecutive tokens). With speculative decoding or pipeline parallelism
    ``remote_num_tokens`` may count tokens still in flight: the digest covers those that are certain.
    """
    if handle.get("do_remote_decode") is not True or not handle.get("remote_num_tokens"):
        return
    digest = to_json(fingerprint(all_token_ids[: handle["remote_num_tokens"]]))
    digest["prompt"] = prompt_end_to_json(prompt_end(all_token_ids[:prompt_tokens]))
    handle[KEY] = digest if block_size is None else {**digest, "block_size": block_size}


def tokens_identify(request: Any) -> bool:
    """Whether the token ids alone say what the KV was computed from: not so for embeddings, images and sound."""
    return request.prompt_embeds is None and not request.mm_features


def block_size_tokens(scheduler: Any) -> int | None:
    """Return how many tokens one entry of ``remote_block_ids`` covers, if that is one number."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or scheduler.dcp_world_size != 1 or scheduler.pcp_world_size != 1:
        return None
    return int(groups[0].kv_cache_spec.block_size)


@functools.cache
def _warn_once(kind: str, message: str) -> None:
    log.warning("kvloop plugin: no digest for a handle: %s: %s", kind, message)
