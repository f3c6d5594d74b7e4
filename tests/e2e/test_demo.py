"""``kvloop demo`` as a user runs it, on the tiny model: its numbers, its exit status, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

PROCESSES = Path("/proc")


def command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "extproc.cli", "demo", "--model", str(model), "--document-tokens", "1500", *options]


def mentioning(text: str) -> list[str]:
    """Command lines of running processes that mention ``text``."""
    lines = []
    for entry in PROCESSES.iterdir():
        try:
            lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]


def run(arguments: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.run(  # noqa: S603 - our own command
        arguments, check=False, capture_output=True, text=True, env=environment, timeout=300, cwd=directory
    )


def test_the_demo_reuses_the_whole_sequence_and_gives_equal_texts(model: Path, tmp_path: Path) -> None:
    done = run(command(model, "--turns", "3", "--json", "out.json"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    turns = result["turns"]
    assert [turn["text_equal"] for turn in turns] == [True, True, True]
    assert [turn["reused_tokens"] for turn in turns] == [0, turns[1]["held_tokens"], turns[2]["held_tokens"]]
    assert turns[2]["reused_tokens"] > turns[1]["reused_tokens"] > 1000
    assert result["run"]["tokens_read_by_prefill_worker"] == turns[1]["reused_tokens"] + turns[2]["reused_tokens"]
    assert "OK: all texts equal; every turn reused the whole previous sequence" in done.stdout
    assert (tmp_path / "kvloop-demo.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("kvloop-demo-*")) == []
    assert mentioning(str(tmp_path)) == []


def test_ctrl_c_stops_everything(model: Path, tmp_path: Path) -> None:
    with subprocess.Popen(  # noqa: S603 - our own command
        command(model),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        # A quick start may pass any one state between two looks, but never all of a worker's.
        lines = []
        for line in demo.stdout:
            lines.append(line)
            if "decode worker: " in line:
                break
        else:
            pytest.fail("the demo ended early:\n" + "".join(lines))
        running = mentioning(str(tmp_path))
        assert len(running) >= 2
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(60) == 130
    assert "Interrupted; everything was stopped." in rest
    assert mentioning(str(tmp_path)) == []
