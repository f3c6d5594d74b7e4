"""Start, watch and stop the processes of a local stack. Each runs under a warden, so none outlives this one.

A component's output goes to a log file of its own; when it dies, the error carries the log's last lines and,
where the cause is a known one, what to do about it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from workers import warden

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

LOG_LINES_SHOWN: Final = 25
STOP_MARGIN_SECONDS: Final = 10.0
"""On top of a component's grace time: killing what is left takes a moment on a busy machine."""

STARTING: Final = "starting"
"""The state of a component whose log says nothing yet."""

READY: Final = "ready"
"""The state of a component that answers."""

KNOWN_CAUSES: Final[tuple[tuple[str, str], ...]] = (
    (r"Address already in use|address in use", "another program took the port meanwhile: start again"),
    (
        r"MemoryError|Cannot allocate memory|out of memory|DefaultCPUAllocator",
        "there is not enough memory: stop other programs, or use a smaller model",
    ),
    (r"No space left on device", "the disk is full: free some space (`KVLOOP_CACHE` and `TMPDIR` say where)"),
    (r"max_model_len|maximum context length", "the model's context is too short: use a shorter document"),
    # Last, because vLLM's log names missing optional modules even when all is well.
    (
        r"ModuleNotFoundError|PackageNotFoundError|torchvision::nms",
        "a dependency is missing or broken: run `make setup` again",
    ),
)
"""What a log says -> what to do about it; the first that matches wins."""


class StackError(Exception):
    """The local stack did not start, or a part of it died. The message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a component stands: for people who wait."""

    component: str
    state: str
    seconds: float


@dataclass(slots=True)
class Component:
    """One supervised process. ``cores`` empty: any core; ``states``: log patterns and their words for people."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cores: frozenset[int] = frozenset()
    grace_seconds: float = 10.0
    states: tuple[tuple[str, str], ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _started: float = field(default=0.0, init=False)
    _log_start: int = field(default=0, init=False)

    def start(self) -> None:
        """Start the process in a session of its own: a terminal's Ctrl-C reaches only the supervisor."""
        if self.alive():
            raise StackError(f"{self.name} already runs")
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._started = time.monotonic()
        command = [
            *(sys.executable, "-I", warden.__file__),
            *("--cores", ",".join(str(core) for core in sorted(self.cores))),
            *("--grace", str(self.grace_seconds), "--", *self.argv),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the stack's own commands, no shell
                command,
                env=dict(self.env),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Say whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Process ids of the component itself and all below it; the warden is not among them."""
        return warden.descendants(self._process.pid) if self._process is not None and self.alive() else []

    def order_stop(self) -> None:
        """Tell the warden to stop; do not wait."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop the process and everything below it, and wait until all are gone. Harmless when none runs."""
        self.order_stop()
        if self._process is None:
            return
        try:
            self._process.wait(self.grace_seconds + STOP_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            # The warden is stuck or stopped: do its work from here.
            warden.send([*warden.descendants(self._process.pid), self._process.pid], signal.SIGKILL)
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill everything of the component outright, as a crash would, and wait until it is gone."""
        if self._process is not None and self.alive():
            warden.send(self.pids(), signal.SIGKILL)
        self.stop()

    def output(self) -> str:
        """Return what the component wrote since its last start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def state(self) -> str:
        """Return where the component stands by its log, in words for people."""
        output = self.output()
        reached = [words for pattern, words in self.states if re.search(pattern, output)]
        return reached[-1] if reached else STARTING

    def death(self) -> StackError:
        """Describe why the component is not running, with its last log lines and, where known, the fix."""
        status = None if self._process is None else self._process.poll()
        output = self.output()
        lines = output.strip().splitlines()[-LOG_LINES_SHOWN:]
        fix = next((fix for pattern, fix in KNOWN_CAUSES if re.search(pattern, output)), None)
        if fix is None and status == 128 + signal.SIGKILL:
            fix = "something killed it, most likely for want of memory: stop other programs and start again"
        return StackError(
            "\n".join(
                [
                    f"{self.name} ended with exit status {status}; the last lines of {self.log}:",
                    *(f"    {line}" for line in lines or ["(nothing)"]),
                    *([f"What to do: {fix}."] if fix else []),
                ]
            )
        )

    def seconds_running(self) -> float:
        """Return the seconds since the last start."""
        return time.monotonic() - self._started


def wait_until_ready(
    probes: Mapping[str, tuple[Component, Callable[[], bool]]],
    *,
    timeout_seconds: float,
    progress: Callable[[Progress], None],
    poll_seconds: float = 0.2,
) -> None:
    """Poll each component's probe until all have said yes, telling ``progress`` at every look.

    Raises ``StackError`` as soon as one of the processes dies, or when the time is over.
    """
    deadline = time.monotonic() + timeout_seconds
    pending = dict(probes)
    while pending:
        for name, (component, is_ready) in list(pending.items()):
            if not component.alive():
                raise component.death()
            ready = is_ready()
            state = READY if ready else component.state()
            progress(Progress(component.name, state, component.seconds_running()))
            if ready:
                del pending[name]
            elif time.monotonic() > deadline:
                raise StackError(
                    f"{component.name} was not ready after {component.seconds_running():.0f} s ({state});"
                    f" its log is {component.log}. What to do: see whether other programs keep"
                    " the cores busy, then start again."
                )
        if pending:
            time.sleep(poll_seconds)


def stop_all(components: list[Component]) -> None:
    """Stop every component, all at once. Once told, the wardens finish even if this is cut short."""
    for component in components:
        component.order_stop()
    for component in components:
        component.stop()


def inherited_environment() -> dict[str, str]:
    """Return this process's environment less what would configure kvloop or vLLM behind the stack's back."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("KVLOOP_", "VLLM_")) and name.lower() not in PROXY_VARIABLES
    }


PROXY_VARIABLES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""All traffic of a local stack is loopback, so a proxy could only break it."""
