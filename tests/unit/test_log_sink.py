"""A log line is written at once or not at all: it never fails and never stops whoever logs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.log_sink import LogSink
from extproc.metrics import Metrics
from extproc.store import MemoryStore


@pytest.fixture
def pipe():
    """A pipe that holds two pages, as (read end, write end)."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def test_lines_are_written_as_they_are(pipe) -> None:
    reader, writer = pipe
    sink = LogSink(writer)
    assert sink.write("Ž\udcff\n") == 3
    sink.write("two\n")
    assert os.read(reader, 100) == b"\xc5\xbd\\udcff\ntwo\n"
    assert sink.dropped == 0


def test_a_full_disk_drops_lines_and_counts_them() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    sink = LogSink(full)
    try:
        for _ in range(3):
            sink.write("a line\n")
    finally:
        os.close(full)
    assert sink.dropped == 3


def test_a_reader_that_has_stopped_stops_nobody(pipe) -> None:
    reader, writer = pipe
    sink = LogSink(writer)
    for _ in range(1000):
        sink.write("x" * 99 + "\n")
    assert sink.dropped > 900
    held = os.read(reader, 10_000)
    assert set(held.splitlines()) == {b"x" * 99}


def test_a_line_that_was_cut_does_not_spoil_the_next(pipe) -> None:
    reader, writer = pipe
    sink = LogSink(writer)
    sink.write("y" * 10_000 + "\n")
    assert sink.dropped == 1
    cut = os.read(reader, 10_000)
    sink.write("next\n")
    sink.write("and next\n")
    assert set(cut) == {ord("y")}
    assert os.read(reader, 100) == b"\nnext\nand next\n"


def test_a_reader_that_is_gone_or_a_closed_descriptor_harm_nobody(pipe) -> None:
    reader, writer = pipe
    sink = LogSink(writer)
    os.close(reader)
    sink.write("nobody reads\n")
    os.close(writer)
    sink.write("nothing to write to\n")
    sink.flush()
    assert sink.dropped == 2


@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_whoever_logs_goes_on_when_standard_output_is_lost(where: str, tmp_path: Path) -> None:
    script = """
import logging, os, sys, structlog
from extproc.log import configure_logging
configure_logging("info")
structlog.get_logger().info("served")
try:
    raise ValueError
except ValueError:
    structlog.get_logger().exception("failed")
logging.getLogger("some.library").error("theirs")
from extproc.log_sink import SINK
os.write(2, str(SINK.dropped).encode())
"""
    command = [sys.executable, "-c", script]
    shell = f"exec >{where}" if where != "closed" else "exec >&-"
    run = subprocess.run(  # noqa: S603
        ["/bin/sh", "-c", f'{shell}; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert run.stderr == "3"


def test_lost_lines_are_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(MemoryStore(max_conversations=1, max_bytes=1000))
    monkeypatch.setattr("extproc.log_sink.SINK.dropped", 7)
    assert metrics.registry.get_sample_value("kvloop_log_lines_dropped_total") == 7
