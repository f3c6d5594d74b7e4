"""Short real runs of the load benchmarks: they measure what they say, and what they measured is clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.cli import main

PROFILE = {
    "conversations_per_second": 6,
    "turns": {"constant": 3},
    "gap_seconds": {"constant": 0.05},
    "first_prompt_tokens": {"constant": 200},
    "next_prompt_tokens": {"constant": 20},
    "answer_tokens": {"constant": 20},
}


def bench(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "out.json"
    assert main(["bench", *arguments, "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", [[], ["--stock"]], ids=["digest", "stock"])
def test_load_reports_rates_latencies_costs_and_that_nothing_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: list[str]
) -> None:
    profile, plot = tmp_path / "profile.json", tmp_path / "load.png"
    profile.write_text(json.dumps(PROFILE))
    options = ["--seconds", "3", "--decode-tokens-per-second", "100", "--plot", str(plot), *kind]
    result = bench(tmp_path, "load", "--profile", str(profile), *options)
    assert result["failed"] == result["wrong_kv_turns"] == result["leaked_pins"] == result["pins_after_ttl"] == 0
    assert result["statuses"] == {"200": result["turns"]}
    # Every answer is 20 tokens and the opening chunk.
    assert result["chunks"] == 21 * result["turns"]
    assert result["reuse_rate"] == 1.0
    assert result["handles_read"] == result["later_turns"] > 0
    # One message for each chunk at most (Envoy joins what came together), and a few for the request.
    assert 0 < result["ext_proc_messages"] <= result["chunks"] + 8 * result["turns"]
    assert set(result["cost"]) == {"ext_proc", "Envoy", "workers"}
    assert result["cpu_seconds"]["ext_proc"] > 0
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    assert plot.stat().st_size > 10_000
    assert "wrong-KV turns 0" in capsys.readouterr().out


def test_a_trace_is_played(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    turns = [
        {"at_seconds": 0.2 * number, "conversation": number % 2, "prompt_tokens": 100, "answer_tokens": 5}
        for number in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, turns)))
    result = bench(tmp_path, "load", "--trace", str(trace), "--seconds", "3")
    assert (result["turns"], result["chunks"], result["later_turns"]) == (6, 36, 4)
    assert result["outcomes"] == {"cold": 2, "reused": 4}


def test_peers_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(tmp_path, "peers", "--quick", "--only", "legs,Envoy alone,kvloop", "--concurrency", "8")
    rows = {row["name"]: row for row in result["peers"]}
    assert [row.get("absent") for row in rows.values()] == [None] * 4
    assert {row["failed"] for row in rows.values()} == {0}
    assert "reused" in rows["kvloop"]["outcomes"]
    assert "added_ttft_ms" in rows["kvloop"]
    assert "added_ttft_ms" not in rows["Envoy alone"]
    assert set(rows["kvloop"]["cost"]) == {"ext_proc", "Envoy"}
    assert set(rows["Envoy alone"]["cost"]) == {"Envoy"}
    assert rows["two legs, no proxy"]["us_per_chunk"] == 0
    assert "| kvloop " in capsys.readouterr().out


def test_an_absent_peer_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from workers import venvs  # noqa: PLC0415 - beside what it breaks

    def cannot(*_: object) -> None:
        raise venvs.PeerAbsentError("no network today")

    monkeypatch.setattr(venvs, "_run", cannot)
    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path / "empty"))
    result = bench(tmp_path, "peers", "--quick", "--only", "FastAPI", "--concurrency", "2")
    assert [row["absent"] for row in result["peers"]] == ["no network today"]
    assert "absent: FastAPI + httpx: no network today" in capsys.readouterr().out
