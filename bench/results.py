"""Results as JSON, with what machine they are from: numbers of a busy machine mean little without its load."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any

import orjson

from extproc import __version__

if TYPE_CHECKING:
    from pathlib import Path


def machine() -> dict[str, Any]:
    """Return where and when this runs. ``load`` is the system's load average of the last minute."""
    return {
        "kvloop": __version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, indented, for people and programs."""
    path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - not a file of ours
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return "unknown"
