"""What a simulated worker is like: the vLLM it stands for, its sizes, its speed, its quirks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workers.sim.engine import EngineSettings
from workers.sim.text import Model

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take. The default is as fast as this machine can."""

    prefill_tokens_per_second: float | None = None
    """One prompt after the other, as one accelerator would."""
    decode_tokens_per_second: float | None = None
    """Per sequence, however many run."""
    request_overhead_seconds: float = 0.0

    def prefill_seconds(self, tokens: int) -> float:
        """Return how long computing ``tokens`` of a prompt takes."""
        return 0.0 if self.prefill_tokens_per_second is None else tokens / self.prefill_tokens_per_second

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
