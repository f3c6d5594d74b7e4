"""CPU time and memory of processes, as the kernel accounts for them (``/proc``)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MEBIBYTE: Final = 1024 * 1024
_UTIME, _STIME, _RSS = 11, 12, 21
"""Positions after the process' name in ``/proc/PID/stat``: fields 14, 15 and 24 of proc(5)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time since the start (user and system, all threads) and resident memory, of one or more processes."""

    cpu_seconds: float
    rss_mib: float


def usage_of(pids: Iterable[int | str]) -> Usage:
    """Add up the usage of processes (``self`` is this one); one that is gone counts nothing."""
    ticks = pages = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name, in parentheses, may hold spaces and parentheses itself.
        fields = stat.rpartition(")")[2].split()
        ticks += int(fields[_UTIME]) + int(fields[_STIME])
        pages += int(fields[_RSS])
    return Usage(ticks / TICKS_PER_SECOND, pages * PAGE_BYTES / MEBIBYTE)


def usable_cores() -> list[int]:
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def proxy_and_load_cores() -> tuple[frozenset[int], frozenset[int]]:
    """Return one core for what is measured, and the cores for the load and the workers: others, if there are any."""
    cores = usable_cores()
    return frozenset(cores[:1]), frozenset(cores[1:3] or cores[:1])
