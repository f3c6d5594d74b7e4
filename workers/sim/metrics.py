"""``/metrics``: the few of vLLM's that kvloop, dashboards and tests read, labelled as vLLM labels them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.sim.rank import Rank
    from workers.sim.settings import WorkerSettings


def metrics_text(ranks: Sequence[Rank], settings: WorkerSettings) -> str:
    """Return the exposition text: every metric once per rank."""
    shown: list[tuple[str, str, str, Callable[[Rank], float]]] = [
        (
            "vllm:num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            lambda rank: rank.runner.running_count - rank.waiting,
        ),
        (
            "vllm:num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            lambda rank: rank.waiting,
        ),
        (
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            lambda rank: rank.engine.pool.usage,
        ),
        (
            "vllm:prompt_tokens_total",
            "counter",
            "Number of prefill tokens processed.",
            lambda rank: rank.engine.counters.prompt_tokens_computed + rank.engine.counters.prompt_tokens_trusted,
        ),
    ]
    lines: list[str] = []
    for name, kind, text, value in shown:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{engine="{rank.number}",model_name="{settings.model_name}"}} {float(value(rank))}'
            for rank in ranks
        ]
    info = "vllm:cache_config_info"
    lines += [f"# HELP {info} Information of the LLMEngine CacheConfig", f"# TYPE {info} gauge"]
    lines += [f"{info}{{{_cache_labels(rank, settings)}}} 1.0" for rank in ranks]
    return "\n".join(lines) + "\n"


def _cache_labels(rank: Rank, settings: WorkerSettings) -> str:
    size = settings.engine.block_size
    return (
        f'_block_size_resolved="True",block_size="{size}",cache_dtype="auto",effective_attention_block_size="{size}",'
        f'enable_prefix_caching="{settings.engine.prefix_caching}",engine="{rank.number}",'
        f'num_gpu_blocks="{settings.engine.block_count}"'
    )
