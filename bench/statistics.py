"""The few statistics a benchmark needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the sorted values lie; the nearest rank, so one of them."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def percentiles(values: Sequence[float], *, scale: float = 1.0) -> dict[str, float]:
    """Return p50, p90, p99 and max, each times ``scale``; empty when there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {name: percentile(ordered, share) for name, share in SHARES.items()} | {"max": ordered[-1]}
    return {name: round(value * scale, 3) for name, value in found.items()}


def two_costs(few: tuple[float, float, float], many: tuple[float, float, float]) -> tuple[float, float]:
    """Solve for what one request and what one chunk cost.

    ``few`` and ``many`` are (cost, requests, chunks) of two runs that differ in chunks per request. Returns (per request,
    per chunk) in the cost's unit.
    """
    (cost_1, requests_1, chunks_1), (cost_2, requests_2, chunks_2) = few, many
    determinant = requests_1 * chunks_2 - requests_2 * chunks_1
    if not determinant:
        raise ValueError("both runs have the same number of chunks per request")
    per_request = (cost_1 * chunks_2 - cost_2 * chunks_1) / determinant
    per_chunk = (requests_1 * cost_2 - requests_2 * cost_1) / determinant
    return per_request, per_chunk
