"""The simulated timing fitted to real runs: what made the times is found again, and what cannot be read is said."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ConfigError
from workers.sim import add_arguments, main
from workers.sim.calibration import Leg, as_text, fit, modelled_seconds, options, read_legs
from workers.sim.settings import Timing

REAL = Timing(
    request_overhead_seconds=0.05,
    prefill_tokens_per_second=400,
    attention_pairs_per_second=2e6,
    transfer_bytes_per_second=1e8,
    kv_bytes_per_token=20_000,
)
SHAPES = [(300, 0), (330, 310), (900, 0), (950, 912), (950, 400), (3000, 0), (3040, 3010), (3100, 2000)]


def legs(timing: Timing, shapes: list[tuple[int, int]]) -> list[Leg]:
    return [Leg(prompt, reused, modelled_seconds(timing, Leg(prompt, reused, 0.0))) for prompt, reused in shapes]


def demo(measured: list[Leg]) -> dict[str, Any]:
    """As ``kvloop demo --json`` writes it; the run without reuse tells the cold legs."""
    turns = []
    for leg in measured:
        outcome = "reused" if leg.reused else "cold"
        receipt = f"outcome={outcome}, reused={leg.reused}, prompt={leg.prompt}, prefill_ms={leg.seconds * 1000}"
        turns.append({"receipt_off": "", "receipt_on": receipt})
    return {"turns": turns}


def test_what_made_the_times_is_found_again() -> None:
    found = fit(read_legs(demo(legs(REAL, SHAPES))), kv_bytes_per_token=20_000)
    assert found.request_overhead_seconds == pytest.approx(REAL.request_overhead_seconds, rel=0.05)
    assert found.prefill_tokens_per_second == pytest.approx(REAL.prefill_tokens_per_second, rel=0.05)
    assert found.attention_pairs_per_second == pytest.approx(REAL.attention_pairs_per_second, rel=0.05)
    assert found.transfer_bytes_per_second == pytest.approx(REAL.transfer_bytes_per_second, rel=0.05)


def test_the_ttft_bench_tells_legs_too() -> None:
    turn = {"kind": "cold", "prompt_tokens": 506, "reused_tokens": 0, "prefill_ms": 544.6, "render_ms": None}
    assert read_legs({"turns": [turn]}) == [Leg(506, 0, 0.5446)]


def test_a_cost_that_shows_nowhere_is_none_and_none_is_below_zero() -> None:
    measured = [Leg(100, 0, 1.0), Leg(200, 0, 1.9), Leg(400, 0, 3.5)]  # less than linear
    found = fit(measured, kv_bytes_per_token=1)
    assert (found.attention_pairs_per_second, found.transfer_bytes_per_second) == (None, None)
    assert found.request_overhead_seconds > 0
    assert all("pairs" not in option and "transfer" not in option for option in options(found))


def test_the_fit_is_told_leg_by_leg() -> None:
    measured = [Leg(100, 0, 1.0)]
    text = as_text(Timing(prefill_tokens_per_second=200, kv_bytes_per_token=9), measured)
    assert "--prefill-tokens-per-second 200" in text
    assert text.splitlines()[-1].split() == ["100", "0", "1000.0", "500.0", "-50.0%"]


def parsed(*argv: str) -> Any:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


def test_the_command_reads_demos_and_prints_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(demo(legs(REAL, SHAPES))))
    assert main(parsed("calibrate", str(path), str(path), "--kv-bytes-per-token", "20000")) == 0
    assert "--attention-pairs-per-second" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [None, "{}", "[]", "no json", '{"turns": [{"prefill_ms": 1}]}', '{"turns": [{"receipt_on": "outcome=refused"}]}'],
)
def test_what_is_no_demo_is_said(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "demo.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"demo\.json is not what"):
        main(parsed("calibrate", str(path)))


def test_calibrating_needs_files_and_serving_takes_none() -> None:
    with pytest.raises(ConfigError, match="nothing to calibrate with"):
        main(parsed("calibrate"))
    with pytest.raises(ConfigError, match="only calibrate reads files"):
        main(parsed("fleet", "demo.json"))
