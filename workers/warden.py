"""Run one command so that nothing of it outlives whoever asked for it. Run by path; standard library only.

``python -I warden.py [--cores 0,1] [--grace SECONDS] -- COMMAND…``

A vLLM server starts engine processes of its own, and those may outlive it. The warden therefore

* becomes the *subreaper* of everything below it: whatever a descendant does (double fork, new session), the
  kernel hands its orphans to the warden, so walking the process tree from here finds them all;
* holds a pipe from the asker as standard input. The pipe's end is the order to stop, and the kernel closes it
  even when the asker is killed outright;
* takes everything down when the command itself ends, and then ends with the command's exit status.

Stopping is SIGTERM to the command (vLLM takes its engines down in order), a grace time, then SIGKILL to all
that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Numbers from ``<linux/prctl.h>``."""

POLL_SECONDS = 0.05


def descendants(ancestor: int) -> list[int]:
    """Process ids of everything below ``ancestor``, in no order, zombies left out. Reads ``/proc``."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue  # it ended while we looked
        # The second field is the command name in parentheses and may hold anything: count from the last one.
        state, parent = stat.rpartition(")")[2].split()[:2]
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in {"Z", "X"}:
            zombies.add(int(entry.name))
    found: list[int] = []
    queue = [ancestor]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [pid for pid in below if pid not in zombies]
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _kill_the_rest() -> None:
    while left := descendants(os.getpid()):
        send(left, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def guard(command: list[str], *, cores: set[int], grace_seconds: float) -> int:
    """Run ``command`` on ``cores`` (empty: any) until it or standard input ends; return its exit status."""
    stop = False

    def order_to_stop(_number: int, _frame: object) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, order_to_stop)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        child = subprocess.Popen(  # noqa: S603 - running the command it is given is the warden's purpose
            command,
            stdin=subprocess.DEVNULL,
            # Should the warden itself be killed, so is the command. Safe here: the warden has one thread.
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
    except OSError as error:
        print(f"warden: cannot run {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - its log
        return 127
    while not stop and child.poll() is None:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        stop = stop or (bool(readable) and os.read(0, 4096) == b"")
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
    status = child.poll()
    _kill_the_rest()
    if status is None:
        status = child.wait()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Parse the command line described in the module's docstring and run it."""
    parser = argparse.ArgumentParser(prog="warden")
    parser.add_argument("--cores", default="", help="comma-separated core numbers")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    cores = {int(core) for core in arguments.cores.split(",") if core}
    return guard(arguments.command, cores=cores, grace_seconds=arguments.grace)


if __name__ == "__main__":
    sys.exit(main())
