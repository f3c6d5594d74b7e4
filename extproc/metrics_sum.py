"""One exposition of metrics made of those of several processes.

Counts and sizes are added up. Where a sum would say nothing, the least or the greatest is told. What a process counted before
it ended is counted on, or every restart would look to Prometheus like a jump.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LEAST: Final = frozenset({"kvloop_store_up", "process_start_time_seconds"})
_GREATEST: Final = frozenset({"kvloop_prompt_ids_differed", "kvloop_build_info", "process_max_fds"})
_COUNTED: Final = frozenset({"counter", "histogram"})


class MetricsSum:
    """The sum over processes that come and go. ``text`` of a process is what its ``/metrics`` said."""

    def __init__(self) -> None:
        self._ended: dict[str, Metric] = {}

    def add_ended(self, text: str) -> None:
        """Go on counting what a process had counted when it was last asked."""
        for metric in text_string_to_metric_families(text):
            if metric.type in _COUNTED:
                _add(self._ended, metric)

    def exposition(self, texts: Iterable[str]) -> bytes:
        """Return the sum of the running processes' metrics and those of the ended ones."""
        total: dict[str, Metric] = {}
        for metric in self._ended.values():
            _add(total, metric)
        for text in texts:
            for metric in text_string_to_metric_families(text):
                _add(total, metric)
        registry = CollectorRegistry()
        registry.register(_Collected(total))
        return generate_latest(registry)


class _Collected:
    def __init__(self, metrics: dict[str, Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()


def _add(total: dict[str, Metric], metric: Metric) -> None:
    if metric.name not in total:
        total[metric.name] = Metric(metric.name, metric.documentation, metric.type)
    into = total[metric.name]
    combine = _combination(metric.name)
    known = {(sample.name, *sorted(sample.labels.items())): at for at, sample in enumerate(into.samples)}
    for sample in metric.samples:
        at = known.get((sample.name, *sorted(sample.labels.items())))
        if at is None:
            into.samples.append(sample)
        else:
            into.samples[at] = into.samples[at]._replace(value=combine(into.samples[at].value, sample.value))


def _combination(name: str) -> Callable[[float, float], float]:
    if name in _LEAST:
        return min
    return max if name in _GREATEST else lambda one, other: one + other
