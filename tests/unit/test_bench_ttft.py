"""What the TTFT benchmark makes of its turns. That it runs on real vLLM is for a quiet machine to show."""

from __future__ import annotations

from typing import Any

from bench.ttft import RENDER_REQUESTS, as_text, median_turn, tokenisations


def turn(kind: str, ttft_ms: float, *, render_ms: float | None = None, renders: int = 0) -> dict[str, Any]:
    return {
        "kind": kind,
        "outcome": kind,
        "prompt_tokens": 500,
        "reused_tokens": 450 if kind == "reused" else 0,
        "ttft_ms": ttft_ms,
        "render_ms": render_ms,
        "prefill_ms": ttft_ms - 20,
        "transfer_ms": None if kind == "cold" else 3.0,
        "compute_ms": ttft_ms - 23,
        "rest_ms": 20.0,
        "renders": renders,
    }


def test_the_median_turn_keeps_its_own_parts_and_the_spread_of_all() -> None:
    middle = median_turn([turn("cold", 300), turn("cold", 100), turn("cold", 200)])
    assert (middle["ttft_ms"], middle["prefill_ms"]) == (200, 180)
    assert (middle["lowest_ttft_ms"], middle["highest_ttft_ms"], middle["repeats"]) == (100, 300, 3)


def test_a_turn_is_tokenised_by_its_render_or_by_its_prefill_never_by_both() -> None:
    turns = [
        turn("cold", 300),
        turn("reused", 30, render_ms=2.0, renders=1),
        turn("reused", 30, render_ms=2.0, renders=1),
    ]
    assert tokenisations(turns) == {"cold": 1.0, "reused": 1.0}


def test_render_requests_are_counted_by_the_workers_own_metric() -> None:
    metrics = (
        "# TYPE http_requests_total counter\n"
        'http_requests_total{handler="/v1/chat/completions/render",method="POST",status="2xx"} 3.0\n'
        'http_requests_total{handler="/v1/completions/render",method="POST",status="2xx"} 1.0\n'
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 9.0\n'
    )
    assert RENDER_REQUESTS.findall(metrics) == ["3.0", "1.0"]


def test_the_table_names_every_turn() -> None:
    turns = [median_turn([turn("cold", 300)]), median_turn([turn("reused", 30, render_ms=2.0, renders=1)])]
    text = as_text({"turns": turns, "tokenisations": tokenisations(turns), "machine": {"load": 0.5}})
    assert "| reused |    500 |    450 |      30 |" in text
    assert "tokenisations per turn: cold 1, reused 1" in text
