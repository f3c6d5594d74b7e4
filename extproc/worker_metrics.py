"""What a vLLM worker's ``/metrics`` says of its KV memory. The only module that knows those names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')
_USAGE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_WAITING: Final = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's KV memory: sizes in tokens (None: not told), ``usage`` 0 to 1, ``waiting`` in requests.

    With several data-parallel engines behind one address, the fullest and the smallest of them.
    """

    block_size_tokens: int | None
    capacity_tokens: int | None
    usage: float
    waiting: int


def read_engine_load(text: str) -> EngineLoad:
    """Read Prometheus' text format; what is missing counts as not told, or as 0."""
    configs = [dict(_LABEL.findall(labels)) for labels in _CONFIG.findall(text)]
    block_sizes = [int(config["block_size"]) for config in configs if "block_size" in config]
    capacities = [int(config["block_size"]) * int(config["num_gpu_blocks"]) for config in configs if len(config) == 2]  # noqa: PLR2004
    return EngineLoad(
        block_size_tokens=min(block_sizes, default=None),
        capacity_tokens=min(capacities, default=None),
        usage=max(_numbers(_USAGE, text), default=0.0),
        waiting=int(max(_numbers(_WAITING, text), default=0.0)),
    )


def _numbers(pattern: re.Pattern[str], text: str) -> list[float]:
    numbers = []
    for found in pattern.findall(text):
        try:
            number = float(found)
        except ValueError:
            continue
        if 0 <= number < float("inf"):
            numbers.append(number)
    return numbers
