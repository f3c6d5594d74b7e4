"""No process of a stack outlives its owner, however either of them ends; and a death is explained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import stack_fakes
from stack_fakes import recorded, running, wait_for

from workers.supervision import (
    Component,
    Progress,
    StackError,
    inherited_environment,
    stop_all,
    wait_until_ready,
)

LEAVE_AND_SLEEP = textwrap.dedent(
    f"""
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, {str(Path(stack_fakes.__file__).parent)!r})
    import stack_fakes
    stack_fakes.record(Path(sys.argv[1]), os.getpid())
    stack_fakes.leave_grandchildren(Path(sys.argv[1]))
    print("ready", flush=True)
    """
)


def component(directory: Path, script: str = "import time; time.sleep(600)", **options: Any) -> Component:
    options = {"grace_seconds": 0.3, **options}
    return Component(
        name="fake worker",
        argv=(sys.executable, "-c", script, str(directory)),
        env=dict(os.environ),
        log=directory / "fake.log",
        **options,
    )


def started(directory: Path, script: str, **options: Any) -> Component:
    part = component(directory, script, **options)
    part.start()
    assert wait_for(lambda: "ready" in part.output()), part.output()
    return part


def test_stop_leaves_nothing_of_a_process_with_stubborn_grandchildren(tmp_path: Path) -> None:
    part = started(tmp_path, LEAVE_AND_SLEEP + "time.sleep(600)")
    assert len(running(recorded(tmp_path))) == 3
    part.stop()
    assert running(recorded(tmp_path)) == []
    assert not part.alive()


def test_grandchildren_die_when_the_process_ends_by_itself(tmp_path: Path) -> None:
    part = started(tmp_path, LEAVE_AND_SLEEP + "sys.exit(3)")
    assert wait_for(lambda: not part.alive())
    assert running(recorded(tmp_path)) == []
    assert "ended with exit status 3" in str(part.death())


def test_kill_leaves_nothing(tmp_path: Path) -> None:
    part = started(tmp_path, LEAVE_AND_SLEEP + "time.sleep(600)")
    part.kill()
    assert running(recorded(tmp_path)) == []


def test_kill_gives_the_process_no_chance_to_react(tmp_path: Path) -> None:
    part = started(
        tmp_path,
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to stop', flush=True), sys.exit()))\n"
        "print('ready', flush=True); time.sleep(600)",
    )
    part.kill()
    assert "asked to stop" not in part.output()


def test_stop_asks_before_it_kills(tmp_path: Path) -> None:
    part = started(
        tmp_path,
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to stop', flush=True), sys.exit()))\n"
        "print('ready', flush=True); time.sleep(600)",
        grace_seconds=20.0,
    )
    part.stop()
    assert "asked to stop" in part.output()


OWNER = textwrap.dedent(
    f"""
    import os, signal, sys, time
    from pathlib import Path
    from workers.supervision import Component, stop_all
    # A shell that runs the tests in the background would have us ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = Path(sys.argv[1])
    parts = [
        Component(
            name="fake", argv=(sys.executable, "-c", {LEAVE_AND_SLEEP + "time.sleep(600)"!r}, str(directory)),
            env=dict(os.environ), log=directory / f"fake{{number}}.log", grace_seconds=0.3,
        )
        for number in range(2)
    ]
    try:
        for part in parts:
            part.start()
        while len(list(directory.glob("*.pid"))) < 6:
            time.sleep(0.02)
        print("up", flush=True)
        time.sleep(600)
    finally:
        stop_all(parts)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_owner_that_is_interrupted_or_killed(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(stack_fakes.__file__).parents[2],
    ) as owner:
        assert owner.stdout.readline() == b"up\n"
        assert len(running(recorded(tmp_path))) == 6
        owner.send_signal(number)
        owner.wait(30)
    assert wait_for(lambda: running(recorded(tmp_path)) == [])


def test_a_component_can_be_started_again_and_then_shows_only_its_new_output(tmp_path: Path) -> None:
    part = started(tmp_path, "print('ready', flush=True); import time; time.sleep(600)")
    part.stop()
    part.argv = (sys.executable, "-c", "print('second life', flush=True); import time; time.sleep(600)")
    part.start()
    assert wait_for(lambda: "second life" in part.output())
    assert "ready" not in part.output()
    part.stop()
    assert part.log.read_text() == "ready\nsecond life\n"


def test_starting_a_running_component_is_refused(tmp_path: Path) -> None:
    part = component(tmp_path)
    part.start()
    with pytest.raises(StackError, match="already runs"):
        part.start()
    part.stop()


def test_a_component_runs_on_its_cores(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    part = component(
        tmp_path,
        "import os; print(os.sched_getaffinity(0), 'ready', flush=True); import time; time.sleep(600)",
        cores=frozenset({core}),
    )
    part.start()
    assert wait_for(lambda: "ready" in part.output())
    part.stop()
    assert f"{{{core}}}" in part.output()


def test_stop_without_start_is_harmless(tmp_path: Path) -> None:
    part = component(tmp_path)
    part.stop()
    part.kill()
    stop_all([part])
    assert part.pids() == []


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    part = Component("fake", ("/no/such/program",), dict(os.environ), tmp_path / "log")
    part.start()
    assert wait_for(lambda: not part.alive())
    assert "cannot run /no/such/program: No such file or directory" in str(part.death())


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        ("print('OSError: [Errno 98] Address already in use')", "start again"),
        ("import no_such_module", "make setup"),
        ("print('DefaultCPUAllocator: can not allocate memory')", "not enough memory"),
        ("print('OSError: [Errno 28] No space left on device')", "the disk is full"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "want of memory"),
    ],
)
def test_a_death_says_what_to_do(tmp_path: Path, script: str, advice: str) -> None:
    part = component(tmp_path, script)
    part.start()
    assert wait_for(lambda: not part.alive())
    message = str(part.death())
    assert message.startswith("fake worker ended with exit status")
    assert advice in message.rpartition("What to do: ")[2]


def test_a_death_shows_the_last_lines_of_this_start_only(tmp_path: Path) -> None:
    (tmp_path / "fake.log").write_text("from an earlier start\n")
    part = component(tmp_path, "print(*range(100), sep='\\n')")
    part.start()
    assert wait_for(lambda: not part.alive())
    lines = [line.strip() for line in str(part.death()).splitlines()[1:]]
    assert lines == [str(number) for number in range(75, 100)]


def test_waiting_reports_every_state_and_ends_when_all_are_ready(tmp_path: Path) -> None:
    part = started(
        tmp_path,
        "import time; print('ready for loading', flush=True); time.sleep(600)",
        states=(("loading", "loading model"), ("never said", "unreachable")),
    )
    seen: list[Progress] = []
    answers = iter([False, False, True])
    wait_until_ready(
        {"fake": (part, lambda: next(answers))}, timeout_seconds=60, progress=seen.append, poll_seconds=0.01
    )
    part.stop()
    assert [(step.component, step.state) for step in seen] == [
        ("fake worker", "loading model"),
        ("fake worker", "loading model"),
        ("fake worker", "ready"),
    ]


def test_waiting_ends_at_once_when_the_process_dies(tmp_path: Path) -> None:
    part = component(tmp_path, "print('gone'); raise SystemExit(7)")
    part.start()
    with pytest.raises(StackError, match="ended with exit status 7"):
        wait_until_ready({"fake": (part, lambda: False)}, timeout_seconds=60, progress=lambda _: None)


def test_waiting_ends_when_the_time_is_over(tmp_path: Path) -> None:
    part = component(tmp_path)
    part.start()
    with pytest.raises(StackError, match=r"fake worker was not ready after \d+ s \(starting\)"):
        wait_until_ready({"fake": (part, lambda: False)}, timeout_seconds=0.05, progress=lambda _: None)
    part.stop()


def test_the_environment_passed_on_holds_no_settings_of_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVLOOP_REUSE", "VLLM_PORT", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("KEPT", "yes")
    environment = inherited_environment()
    assert environment["KEPT"] == "yes"
    assert environment.keys().isdisjoint({"KVLOOP_REUSE", "VLLM_PORT", "HTTP_PROXY", "https_proxy"})
