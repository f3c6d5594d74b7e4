"""What a simulated worker is like: the vLLM it stands for, its sizes, its speed, its quirks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workers.sim.engine import EngineSettings
from workers.sim.text import Model

Role = Literal["prefill", "decode"]


def attention_pairs(context: int, computed: int) -> float:
    """Return how many pairs of tokens attention looks at when ``computed`` tokens follow ``context`` others."""
    return computed * (context + (computed + 1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take. The default is as fast as this machine can."""

    prefill_tokens_per_second: float | None = None
    """One prompt after the other, as one accelerator would."""
    attention_pairs_per_second: float | None = None
    """The quadratic term: pairs of a token computed and a token it attends to. ``None``: attention costs nothing."""
    decode_tokens_per_second: float | None = None
    """Per sequence, however many run."""
    request_overhead_seconds: float = 0.0
    """Of each request that generates, before it reaches the engine."""
    tokenise_tokens_per_second: float | None = None
    """Of each prompt given as text, by whichever route."""
    transfer_bytes_per_second: float | None = None
    """One read of a peer's KV after the other."""
    kv_bytes_per_token: int = 131_072
    """Of the model, over all its layers: 128 KiB are those of an 8B model with grouped queries in 16 bits."""

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """Return how long computing ``tokens`` of a prompt takes, after ``context`` tokens that need no computing."""
        linear = 0.0 if self.prefill_tokens_per_second is None else tokens / self.prefill_tokens_per_second
        if self.attention_pairs_per_second is None:
            return linear
        return linear + attention_pairs(context, tokens) / self.attention_pairs_per_second

    def tokenise_seconds(self, tokens: int) -> float:
        """Return how long tokenising a prompt takes."""
        return 0.0 if self.tokenise_tokens_per_second is None else tokens / self.tokenise_tokens_per_second

    def transfer_seconds(self, tokens: int) -> float:
        """Return how long reading the KV of ``tokens`` from a peer takes."""
        if self.transfer_bytes_per_second is None:
            return 0.0
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_second

    @property
    def token_delay_seconds(self) -> float:
        """Seconds between two generated tokens."""
        return 0.0 if self.decode_tokens_per_second is None else 1.0 / self.decode_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. The engine's part is in ``engine``, the model's in ``model``."""

    role: Role
    model_name: str = "sim"
    engine: EngineSettings = field(default_factory=EngineSettings)
    model: Model = field(default_factory=Model)
    timing: Timing = field(default_factory=Timing)
    vllm_version: Literal["0.32.0", "0.33.0"] = "0.32.0"
    data_parallel_size: int = 1
    """Engines behind one API, each with its own id, KV and side channel."""
    streams_handles: bool = False
    """vLLM 0.32 with kvloop's plugin: the handle on a stream's finish chunk. (0.33 does so by itself.)"""
    digests_handles: bool = False
    """The plugin's other part: ``kvloop_digest`` in a decode worker's handles."""
    scale_out: bool = True
    """``--enable-scale-out``: without it the render endpoints answer 403."""
    advertised_host: str = "127.0.0.1"
    """The address in handles, where peers read KV (``VLLM_NIXL_SIDE_CHANNEL_HOST``)."""
    secret: str | None = None
    """The gateway's secret. Requests with ``kv_transfer_params`` but without it are counted as unguarded."""

    def __post_init__(self) -> None:
        engine = self.engine
        if engine.max_model_len > engine.block_count * engine.block_size:
            msg = (
                f"max_model_len ({engine.max_model_len}) needs more than block_count ({engine.block_count}) blocks"
                f" of {engine.block_size} tokens: such a request would wait for ever"
            )
            raise ValueError(msg)

    @property
    def fingerprint(self) -> str:
        """Return what vLLM would put into ``system_fingerprint``."""
        return f"vllm-{self.vllm_version}-51a71a7e"
