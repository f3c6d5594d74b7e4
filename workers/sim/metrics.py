"""``/metrics``: the few of vLLM's that kvloop, dashboards and tests read, labelled as vLLM labels them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.sim.engine import Engine
    from workers.sim.settings import WorkerSettings


def metrics_text(engine: Engine, settings: WorkerSettings, *, running: int, waiting: int) -> str:
    """Return the exposition text."""
    labels = f'engine="0",model_name="{settings.model_name}"'
    size = settings.engine.block_size
    cache = (
        f'_block_size_resolved="True",block_size="{size}",cache_dtype="auto",'
        f'effective_attention_block_size="{size}",enable_prefix_caching="{settings.engine.prefix_caching}",engine="0",'
        f'num_gpu_blocks="{settings.engine.block_count}"'
    )
    counters = engine.counters
    lines = [
        *_metric(
            "vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", labels, running
        ),
        *_metric("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", labels, waiting),
        *_metric(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            labels,
            engine.pool.usage,
        ),
        *_metric(
            "vllm:prompt_tokens_total",
            "counter",
            "Number of prefill tokens processed.",
            labels,
            counters.prompt_tokens_computed + counters.prompt_tokens_trusted,
        ),
        *_metric("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", cache, 1),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, labels: str, value: float) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
