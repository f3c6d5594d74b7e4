"""``kvloop bench load|ttft|peers|soak|retention|store``. Each lives with what it measures; this module only finds it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from extproc.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

MEASUREMENTS: Final = {
    "load": ("bench.load", "open-loop traffic through real Envoy, simulated workers: rates, latencies, CPU by process"),
    "peers": ("bench.peers", "the same load against the worker, Envoy alone, kvloop and other routers"),
    "ttft": ("bench.ttft", "time to first token on real vLLM (CPU), cold and reused, and where it goes"),
    "soak": ("bench.soak.command", "a long seeded play with edits, forks, retries, restarts: never wrong KV"),
    "retention": ("bench.retention", "ways of retaining KV: time to first token, pinned memory, reads for nothing"),
    "store": ("bench.store", "memory and time of kept conversations, and of very large handles"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements and their options."""
    kinds = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, (module, summary) in MEASUREMENTS.items():
        kind = kinds.add_parser(name, help=summary, description=summary)
        kind.set_defaults(measure=module)
        _import(module).add_arguments(kind)


def main(args: argparse.Namespace) -> int:
    """Run one measurement; returns the exit status."""
    return int(_import(args.measure).main(args))


def _import(module: str) -> _Measurement:
    try:
        return importlib.import_module(module)  # type: ignore[return-value] # a module with these two functions
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("bench", "extproc", "workers")):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install '.[bench]' in a checkout") from error


class _Measurement:
    """What each module of ``MEASUREMENTS`` offers."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]
