"""``kvloop top`` on a real gateway, in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from typing import Any

import pyte
import pytest
from gateway_harness import HOST, PATIENCE_SECONDS, worker

COLUMNS, LINES = 120, 40
LONG = "a question long enough to be worth reading back " * 20
TOP = [sys.executable, "-m", "extproc.cli", "top"]


@pytest.fixture
def busy_gateway(start_gateway) -> Any:
    """Two replicas with a few turns behind them; a chat's turns alternate between them."""
    gateway = start_gateway(decode=[worker("decode")] * 2, replicas=2)
    for _ in range(2):
        chat = gateway.new_chat(max_tokens=5)
        for _ in range(3):
            chat.say(LONG)
    return gateway


def admins(gateway: Any) -> list[str]:
    return [f"{HOST}:{admin}" for _, admin in gateway._extproc_ports]


class Terminal:
    """A program on a pseudo-terminal, and the screen a person would see."""

    def __init__(self, command: list[str]) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.modes_before = termios.tcgetattr(self._theirs)
        self.raw = b""
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            # Its controlling terminal, so that Ctrl-C means what it does to people.
            ["setsid", "--ctty", *command],  # noqa: S607
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self.raw += data
                self._stream.feed(data)
        except OSError:
            pass  # the other end is closed

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(self.screen.display)

    @property
    def modes(self) -> Any:
        """The terminal's modes."""
        return termios.tcgetattr(self._theirs)

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._ours, key)

    def close(self) -> None:
        """End what still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 0)], ids=["q", "ctrl-c"])
def test_the_live_view(busy_gateway, key, status) -> None:
    gateway = busy_gateway
    terminal = Terminal([*TOP, *admins(gateway), f"{HOST}:1", "--interval", "0.2"])
    try:
        gateway.until(lambda: "2/3 up" in terminal.text, f"the view is up: {terminal.raw[-2000:]!r}")
        chat = gateway.new_chat(max_tokens=5)
        chat.say(LONG)
        state = gateway.debug_state(0), gateway.debug_state(1)
        newest = {row["conversation"][:12] for half in state for row in half["conversations"]}
        gateway.until(lambda: all(hash_ in terminal.text for hash_ in newest), "every conversation is shown")
        gateway.until(lambda: "nothing_kept" in terminal.text)
        for engine in {engine["address"] for half in state for engine in half["engines"]}:
            assert engine in terminal.text
        assert "connection refused" in terminal.text
        assert chat.conversation not in terminal.text
        assert terminal.modes != terminal.modes_before, "keys are taken one by one"
        terminal.press(key)
        assert terminal.process.wait(PATIENCE_SECONDS) == status
        assert terminal.modes == terminal.modes_before
        gateway.until(lambda: b"\x1b[?1049l" in terminal.raw, "the screen below comes back")
        assert b"Traceback" not in terminal.raw
    finally:
        terminal.close()


def test_once_as_json_for_scripts(busy_gateway) -> None:
    command = [*TOP, *admins(busy_gateway), "--once", "--json", "--interval", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    seen = json.loads(run.stdout)
    assert [row["up"] for row in seen["replicas"]] == [True, True]
    assert sum(row["kept_turns"] for row in seen["replicas"]) == len(seen["conversations"]) == 4
    assert sum(engine["retained_tokens"] for engine in seen["engines"]) == sum(
        row["tokens"] for row in seen["conversations"]
    )
    assert len(seen["turns"]) == 6
    assert {turn["outcome"] for turn in seen["turns"]} <= {"cold", "reused", "partial"}


def test_once_as_a_picture(busy_gateway) -> None:
    command = [*TOP, admins(busy_gateway)[0], "--once", "--interval", "0.1"]
    wide = {**os.environ, "COLUMNS": "120"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=wide)  # noqa: S603
    assert "1/1 up" in run.stdout
    assert "\x1b" not in run.stdout, "no colours into a pipe"
