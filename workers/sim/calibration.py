"""Fit the simulated workers' timing to real runs.

What ``kvloop demo`` and ``kvloop bench ttft`` write with ``--json`` tells how long each prefill leg took, and of what.

One leg takes: an overhead; a time per computed token; a time per pair of a computed token and one it attends to (the
quadratic term); a time per token read from the decode worker. The four are fitted by least squares on relative errors,
none below zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from workers.sim.settings import Timing, attention_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

TERMS: Final = 4
_SWEEPS: Final = 20_000
_RECEIPT: Final = re.compile(r"(?:^|, )(prompt|reused|prefill_ms)=([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Leg:
    """One prefill leg of a real run: its prompt and what of it was read from the decode worker, in tokens."""

    prompt: int
    reused: int
    seconds: float

    @property
    def terms(self) -> tuple[float, ...]:
        """What the four costs are multiplied by."""
        computed = self.prompt - self.reused
        return (1.0, computed, attention_pairs(self.reused, computed), self.reused)


def read_legs(run: dict[str, Any]) -> list[Leg]:
    """Return the prefill legs of a run's JSON; raises ``ValueError`` if it holds none."""
    legs = []
    for turn in run.get("turns", ()):
        if "prefill_ms" in turn:
            legs.append(Leg(turn["prompt_tokens"], turn["reused_tokens"], turn["prefill_ms"] / 1000))
        for receipt in (turn.get("receipt_off"), turn.get("receipt_on")):
            told = dict(_RECEIPT.findall(receipt or ""))
            if told.keys() == {"prompt", "reused", "prefill_ms"}:
                legs.append(Leg(int(told["prompt"]), int(told["reused"]), float(told["prefill_ms"]) / 1000))
    if not legs:
        raise ValueError("no turn tells prompt, reused tokens and the prefill leg's time")
    return legs


def fit(legs: Sequence[Leg], *, kv_bytes_per_token: int) -> Timing:
    """Return the timing under which the simulated legs come nearest to these."""
    rows = [[term / leg.seconds for term in leg.terms] for leg in legs]
    # Scaled to the size of one, so that coordinate descent converges for tokens and pairs of tokens alike.
    scales = [max(row[term] for row in rows) or 1.0 for term in range(TERMS)]
    scaled = [[row[term] / scales[term] for term in range(TERMS)] for row in rows]
    overhead, token, pair, read = (cost / scale for cost, scale in zip(_least_squares(scaled), scales, strict=True))
    return Timing(
        request_overhead_seconds=overhead,
        prefill_tokens_per_second=_rate(token),
        attention_pairs_per_second=_rate(pair),
        transfer_bytes_per_second=_rate(read / kv_bytes_per_token),
        kv_bytes_per_token=kv_bytes_per_token,
    )


def modelled_seconds(timing: Timing, leg: Leg) -> float:
    """Return how long a simulated worker takes for this leg."""
    computed = leg.prompt - leg.reused
    return (
        timing.request_overhead_seconds
        + timing.prefill_seconds(computed, leg.reused)
        + timing.transfer_seconds(leg.reused)
    )


def as_text(timing: Timing, legs: Sequence[Leg]) -> str:
    """Return the fit for people: the options to simulate it with, and each leg as it was and as it is modelled."""
    lines = ["options:", *(f"  {option}" for option in options(timing)), ""]
    lines.append(f"{'prompt':>8} {'reused':>8} {'measured ms':>12} {'modelled ms':>12} {'off by':>8}")
    for leg in legs:
        modelled = modelled_seconds(timing, leg)
        lines.append(
            f"{leg.prompt:>8} {leg.reused:>8} {leg.seconds * 1000:>12.1f} {modelled * 1000:>12.1f}"
            f" {100 * (modelled / leg.seconds - 1):>+7.1f}%"
        )
    return "\n".join(lines)


def options(timing: Timing) -> list[str]:
    """Return the command line options of ``kvloop sim`` that mean this timing."""
    told = {
        "--request-overhead-seconds": timing.request_overhead_seconds,
        "--prefill-tokens-per-second": timing.prefill_tokens_per_second,
        "--attention-pairs-per-second": timing.attention_pairs_per_second,
        "--transfer-bytes-per-second": timing.transfer_bytes_per_second,
        "--kv-bytes-per-token": timing.kv_bytes_per_token,
    }
    return [f"{name} {value:.6g}" for name, value in told.items() if value is not None]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the costs, none negative, under which every row comes nearest to one: by coordinate descent."""
    costs = [0.0] * TERMS
    squares = [[sum(row[one] * row[other] for row in rows) for other in range(TERMS)] for one in range(TERMS)]
    targets = [sum(row[term] for row in rows) for term in range(TERMS)]
    for _ in range(_SWEEPS):
        for term in range(TERMS):
            if squares[term][term]:
                others = sum(squares[term][other] * costs[other] for other in range(TERMS) if other != term)
                costs[term] = max(0.0, (targets[term] - others) / squares[term][term])
    return costs


def _rate(seconds_each: float) -> float | None:
    return 1 / seconds_each if seconds_each > 0 else None
