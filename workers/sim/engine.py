"""One worker's engine: requests, block admission, KV reads, retained blocks and the handle.

It does what vLLM 0.32's scheduler and NIXL pull connector do (``vllm/v1/core/sched/scheduler.py``,
``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`` and ``pull_worker.py``).

Time comes in as ``now`` (seconds, any monotonic clock); I/O goes out as a ``Load`` for the caller to carry out.

What is mirrored, because kvloop lives with it:

* A read trusts ``min(remote_num_tokens, prompt)`` tokens unseen, and drops remote block ids from the *front* until
  their number fits. A prompt that does not extend the retained sequence thus gets the wrong blocks, silently.
* Whoever reads frees: the reader's notice frees the retained blocks, and a later read finds whatever lies there then.
* Full blocks are cached under the hash of the prompt's tokens whatever they hold, so wrong KV reaches other requests.
* A read that fails on a prefill worker with policy ``recompute`` leaves its request waiting for ever: on its second
  round through the scheduler the connector promises the remote tokens again and nobody fetches them. An abort of such
  a request never gives its blocks back. (kvloop's plugin mends this: ``repaired``.)
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from workers.sim.blocks import BlockPool
from workers.sim.sequence import SequenceKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.sim import kv

EXPIRY_MARGIN_SECONDS: Final = 5.0
"""A read is declined this long before the retained blocks expire (``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN``)."""

REMEMBERED_HANDLES: Final = 200_000
READ_KEYS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")

NextToken = Callable[[bytes, int], tuple[int, bool]]
"""From the context attended to and the number of tokens generated so far to (token id, whether it ends the answer)."""


class EngineDeadError(Exception):
    """An assertion failed inside the engine: vLLM's engine process is gone and every request gets 500."""


class ReadFailedError(Exception):
    """The remote blocks were not read: unknown engine, unknown block, or declined because they are about to expire."""


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    PARKED = "parked"
    READY = "ready"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the vLLM options of the same meaning set. Sizes in tokens and blocks, times in seconds."""

    block_count: int = 4096
    block_size: int = 16
    """The simulated model's text depends on it, so all workers of a fleet must share it."""
    max_model_len: int = 32_768
    prefix_caching: bool = True
    bidirectional: bool = True
    decoder_ttl_seconds: float = 480.0
    lease_seconds: float = 30.0
    recompute_threshold_tokens: int = 64
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    repaired: bool = False
    """kvloop's vLLM plugin mends two of vLLM's faults (``workers.plugin_repair``): a failed read parks a prefill worker's
    request for ever, and a decode worker never lets go of a turn that had no prefill leg.
    """
    registration_generation: int | None = None
    """vLLM 0.33 tells one in its handles (1 unless the worker slept); 0.32 does not."""
    clock_offset_seconds: float = 0.0
    """Added to every exported expiry time: it is the worker's private clock and nobody else may read it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to fetch from a peer. With no ``remote_blocks`` it is only the notice that frees them there."""

    engine_id: str
    host: str
    port: int
    request_id: str
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    expiry_time: float | None


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence on its way through the engine. Lengths in tokens."""

    request_id: str
    prompt: Sequence[int]
    next_token: NextToken
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str = ""
    model: str = ""

    state: State = State.WAITING
    sequence: SequenceKV | None = None
    """Its tokens and blocks, from admission until it ends or loses its blocks."""
    load: Load | None = None
    load_spent: bool = False
    trusted: int = 0
    """Leading tokens whose KV came from the prefix cache or a peer, unseen."""
    generated: list[int] = field(default_factory=list)
    wrong_kv: bool = False
    finish_reason: str | None = None
    handle: dict[str, Any] | None = None

    @property
    def is_prefill_leg(self) -> bool:
        """Whether another worker is to decode what this one prefills."""
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))


@dataclass(slots=True)
class Retained:
    """A finished request's blocks, kept for a peer to read."""

    blocks: list[int]
    deadline: float
    tokens: int


@dataclass(slots=True)
class Counters:
    """What happened since the engine started. ``wrong_kv_turns`` and ``handles_used_twice`` must stay 0."""

    turns: int = 0
    wrong_kv_turns: int = 0
    poisoned_blocks_cached: int = 0
    handles_given: int = 0
    handles_read: int = 0
    handles_released: int = 0
    handles_expired: int = 0
    leases_expired: int = 0
    handles_used_twice: int = 0
    handles_used_late: int = 0
    reads_failed: int = 0
    requests_parked: int = 0
    blocks_leaked: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_trusted: int = 0


class Engine:
    """Admits requests in order, hands out their loads, computes, retains, frees. One per worker life."""

    def __init__(self, settings: EngineSettings, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.settings = settings
        self.engine_id = f"{secrets.token_hex(4)}-{secrets.token_hex(8)}"
        self.host = host
        self.port = port
        self.pool = BlockPool(
            block_count=settings.block_count,
            block_size=settings.block_size,
            prefix_caching=settings.prefix_caching,
        )
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.retained: OrderedDict[str, Retained] = OrderedDict()
        self.leased: OrderedDict[str, Retained] = OrderedDict()
        self.untracked: dict[str, Retained] = {}
        """Turns without a prefill leg: unrepaired, vLLM tracks neither their reading nor their expiry."""
        self.dead = False
        self._used: OrderedDict[str, str] = OrderedDict()

    # --- a request's way through the engine ------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; ``admit`` starts it once there are blocks for it."""
        if self.dead:
            raise EngineDeadError
        self.waiting.append(request)

    def admit(self, now: float) -> list[Request]:
        """Start waiting requests in order while blocks last; each is then LOADING, PARKED or READY."""
        self.expire(now)
        admitted = []
        while self.waiting and self._place(self.waiting[0]):
            admitted.append(self.waiting.popleft())
        return admitted

    def finish_load(self, request: Request, memories: Sequence[kv.Memory] | None, now: float) -> None:
        """Take what a ``Load`` brought (``None``: it failed) and let the request go on."""
        load = request.load
        request.load = None
        if load is None:
            return
        if memories is not None:
            for block, memory in zip(load.local_blocks, memories, strict=True):
                self.pool.load(block, memory)
        elif load.local_blocks:
            self.counters.reads_failed += 1
        if request.state is State.FINISHED:
            self._release(request)
        elif request.state is State.LOADING:
            self._go_on(request, failed=memories is None and bool(load.local_blocks), now=now)

    def prefill(self, request: Request) -> int:
        """Compute what of the prompt is not there yet; return how many tokens that took."""
        sequence = _kv_of(request)
        computed = sequence.compute(request.trusted)
        request.wrong_kv = request.wrong_kv or sequence.wrong
        self.counters.poisoned_blocks_cached += sequence.poisoned_blocks
        self.counters.prompt_tokens_computed += computed
        self.counters.prompt_tokens_trusted += sequence.length - computed
        if not request.generated:
            self.counters.turns += 1
            self.counters.wrong_kv_turns += sequence.wrong
        return computed

    def step(self, request: Request, now: float) -> int | None:
        """Generate one token and return its id; ``None`` when the request lost its blocks and must be admitted again.

        Sets ``finish_reason`` (and the handle) with the last token.
        """
        if request.generated and not self._append(request):
            return None
        token, ends = request.next_token(_kv_of(request).attended, len(request.generated))
        request.generated.append(token)
        if ends:
            self.finish(request, "stop", now)
        elif len(request.generated) >= request.max_tokens:
            self.finish(request, "length", now)
        return token

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request. ``stop`` and ``length`` may retain its blocks for a peer and set the handle."""
        request.finish_reason = reason
        was, request.state = request.state, State.FINISHED
        if was is State.WAITING:
            self.waiting.remove(request)
        elif was is State.PARKED:
            self.counters.blocks_leaked += len(_kv_of(request).blocks)
        elif was is State.READY:
            params = request.kv_transfer_params
            retains = params and (request.is_prefill_leg or self.settings.bidirectional)
            if retains and reason in {"stop", "length"}:
                self._retain(request, now)
            else:
                self._release(request)
        # LOADING: a peer's blocks are being copied into ours; finish_load frees them.

    def abort(self, request: Request, now: float) -> None:
        """End a request whose client is gone or whose stop string was seen: nothing is retained."""
        if request.state is not State.FINISHED:
            self.finish(request, "abort", now)

    # --- what peers ask for -----------------------------------------------------------------------------------

    def serve_read(
        self, request_id: str, blocks: Sequence[int], expiry_time: float | None, now: float
    ) -> list[kv.Memory]:
        """Copy what lies in ``blocks`` now and take the reader's notice, which frees what ``request_id`` retained."""
        self.expire(now)
        local_now = now + self.settings.clock_offset_seconds
        if blocks and expiry_time is not None and local_now + EXPIRY_MARGIN_SECONDS >= expiry_time:
            raise ReadFailedError("the blocks are about to expire")
        if any(not 0 < block <= self.settings.block_count for block in blocks):
            raise ReadFailedError("no such block")
        memories = self.pool.read(blocks)
        self._take_notice(request_id, read=bool(blocks))
        return memories

    def renew(self, request_id: str, now: float) -> None:
        """Take a decode worker's heartbeat: its request still waits for blocks, so keep ours for it."""
        lease = self.leased.get(request_id)
        if lease is not None:
            lease.deadline = now + self.settings.lease_seconds
            self.leased.move_to_end(request_id)

    def expire(self, now: float) -> None:
        """Free retained blocks nobody read in time."""
        for kept in (self.retained, self.leased):
            while kept:
                request_id, first = next(iter(kept.items()))
                if now < first.deadline:
                    break
                self.counters.handles_expired += kept is self.retained
                self.counters.leases_expired += kept is self.leased
                self._free_retained(kept, request_id, "expired")

    def next_deadline(self) -> float | None:
        """Return when ``expire`` would next free something, in the clock ``now`` is in."""
        deadlines = [next(iter(kept.values())).deadline for kept in (self.retained, self.leased) if kept]
        return min(deadlines, default=None)

    @property
    def retained_tokens(self) -> int:
        """Tokens whose KV finished decode requests keep for a later turn."""
        return sum(kept.tokens for kept in self.retained.values())

    # --- inside -----------------------------------------------------------------------------------------------

    def _place(self, request: Request) -> bool:
        """Find blocks for the whole prompt (and, after a preemption, for what was generated); plan the load."""
        size = self.settings.block_size
        if request.sequence is None:
            # The last generated token has no KV yet: ``step`` computes it.
            tokens = [*request.prompt, *request.generated[:-1]] if request.generated else request.prompt
            request.sequence = SequenceKV(self.pool, tokens, model=request.model, cache_salt=request.cache_salt)
        sequence = request.sequence
        hits = sequence.cached_blocks()
        missing = -(-sequence.length // size) - len(hits)
        if missing > self.pool.free_count - sum(not self.pool.is_held(block) for block in hits):
            return False
        external, waits = self._matched(request, len(hits) * size)
        self.pool.adopt(hits)
        sequence.blocks = [*hits, *self.pool.allocate(missing)]
        request.trusted = len(hits) * size + external
        request.load = self._plan(request, sequence.blocks, hits=len(hits), external=external)
        if waits:
            request.state = State.PARKED if request.load is None else State.LOADING
            self.counters.requests_parked += request.load is None
        else:
            request.state = State.READY
        return True

    def _matched(self, request: Request, local: int) -> tuple[int, bool]:
        """Return how many tokens the peer is believed to hold beyond ``local``, and whether to wait for them."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and len(request.prompt) > local:
            return len(request.prompt) - local, True
        has_keys = params.get("remote_block_ids") and all(key in params for key in READ_KEYS)
        if self.settings.repaired and (request.load_spent or not self.settings.bidirectional):
            return 0, False
        if params.get("do_remote_decode") and has_keys:
            count = min(params.get("remote_num_tokens") or 0, len(request.prompt)) - local
            if count > 0 and count >= self.settings.recompute_threshold_tokens:
                return count, True
        return 0, False

    def _plan(self, request: Request, blocks: list[int], *, hits: int, external: int) -> Load | None:
        """Return the read (or the mere notice) the request's params ask for, once per request."""
        params = request.kv_transfer_params or {}
        wanted = params.get("do_remote_prefill") or (
            params.get("do_remote_decode") and self.settings.bidirectional and not request.load_spent
        )
        if not wanted:
            return None
        request.load_spent = True
        params["do_remote_prefill"] = False
        groups = params.get("remote_block_ids")
        if not groups:
            self._insist(external == 0)
            return None
        if any(key not in params for key in READ_KEYS):
            return None
        last = -(-(hits * self.settings.block_size + external) // self.settings.block_size)
        local = blocks[hits:last] if external else []
        remote: Sequence[int] = groups[0]
        if local:
            self._insist(len(groups) == 1 and len(local) <= len(remote))
        return Load(
            engine_id=str(params["remote_engine_id"]),
            host=str(params["remote_host"]),
            port=int(params["remote_port"]),
            request_id=str(params["remote_request_id"]),
            remote_blocks=tuple(remote[-len(local) :]) if local else (),
            local_blocks=tuple(local),
            expiry_time=params.get("remote_blocks_expiry_time"),
        )

    def _insist(self, holds: bool) -> None:  # noqa: FBT001 - an assertion's argument
        if not holds:
            self.dead = True
            raise EngineDeadError

    def _go_on(self, request: Request, *, failed: bool, now: float) -> None:
        request.state = State.READY
        if failed and self.settings.load_failure_policy == "fail":
            self.finish(request, "error", now)
        elif failed:
            self._queue_again(request)

    def _append(self, request: Request) -> bool:
        """Compute the KV of the token generated last; without a block for it, give all up and queue again."""
        sequence = _kv_of(request)
        if sequence.computed % self.settings.block_size == 0:
            if not self.pool.free_count:
                self.counters.preemptions += 1
                self._queue_again(request)
                return False
            sequence.blocks += self.pool.allocate(1)
        poisoned = sequence.poisoned_blocks
        sequence.append(request.generated[-1])
        self.counters.poisoned_blocks_cached += sequence.poisoned_blocks - poisoned
        return True

    def _queue_again(self, request: Request) -> None:
        self._release(request)
        request.state = State.WAITING
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.pool.release(request.sequence.blocks)
            request.sequence = None

    def _retain(self, request: Request, now: float) -> None:
        settings = self.settings
        to_decode = request.is_prefill_leg
        ttl = settings.lease_seconds if to_decode else settings.decoder_ttl_seconds
        sequence = _kv_of(request)
        request.sequence = None
        kept = Retained(sequence.blocks, now + ttl, sequence.computed)
        if to_decode:
            self.leased[request.request_id] = kept
        elif settings.repaired or request.load_spent:
            self.retained[request.request_id] = kept
        else:
            self.untracked[request.request_id] = kept
            self.counters.blocks_leaked += len(kept.blocks)
        self.counters.handles_given += not to_decode
        request.handle = {
            "do_remote_prefill": to_decode,
            "do_remote_decode": not to_decode,
            "remote_block_ids": [list(kept.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": kept.tokens,
            "remote_blocks_expiry_time": None if to_decode else kept.deadline + settings.clock_offset_seconds,
            "transfer_mode": "pull",
        }
        if settings.registration_generation is not None:
            request.handle["remote_registration_generation"] = settings.registration_generation
        if to_decode:
            request.handle["remote_prefill_cached_tokens"] = request.trusted

    def _take_notice(self, request_id: str, *, read: bool) -> None:
        why = "read" if read else "released"
        if request_id in self.leased:
            self._free_retained(self.leased, request_id, why)
        elif request_id in self.retained:
            self.counters.handles_read += read
            self.counters.handles_released += not read
            self._free_retained(self.retained, request_id, why)
        elif request_id in self.untracked:
            self.counters.handles_read += read
            self.counters.handles_released += not read
        elif self._used.get(request_id) == "read":
            # A release of what was read already reads nothing; vLLM only counts it.
            self.counters.handles_used_twice += read
        else:
            # After a release or the expiry only a request that was given up may still read, more slowly than anybody
            # waits for it. Were it alive, it would hold wrong KV, and that is counted.
            self.counters.handles_used_late += read

    def _free_retained(self, kept: OrderedDict[str, Retained], request_id: str, why: str) -> None:
        self.pool.release(kept.pop(request_id).blocks)
        self._used[request_id] = why
        if len(self._used) > REMEMBERED_HANDLES:
            self._used.popitem(last=False)


def _kv_of(request: Request) -> SequenceKV:
    if request.sequence is None:
        msg = f"{request.request_id} holds no blocks"
        raise RuntimeError(msg)
    return request.sequence
