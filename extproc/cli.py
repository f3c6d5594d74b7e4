"""The ``kvloop`` command. Each subcommand lives with what it starts; this module only finds it."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError
from pydantic_settings import SettingsError

from extproc import __version__
from extproc.errors import ConfigError
from extproc.settings import not_json, problems, unknown_variables

if TYPE_CHECKING:
    from collections.abc import Sequence

# Modules with ``add_arguments(parser)`` and ``main(args) -> int``, imported only when their command is used: the gateway
# must start without vLLM, and a worker without Envoy.
_COMMANDS: Final = {
    "serve": ("extproc.server", "run the ext_proc service (settings: KVLOOP_* variables)"),
    "top": ("extproc.top", "watch running gateways: turns, times, engines, conversations"),
    "doctor": ("extproc.doctor", "ask every part of a deployment how it is, and say what to change"),
    "envoy": ("extproc.envoy_cli", "render or validate the Envoy configuration"),
    "worker": ("workers.launch", "run a vLLM prefill or decode worker"),
    "sim": ("workers.sim", "run simulated workers"),
    "demo": ("workers.demo", "play a multi-turn chat on real vLLM workers, reuse off and on"),
    "bench": ("bench.cli", "measure: load, peers, TTFT, store, soak"),
}


_READ_SETTINGS: Final = ("envoy", "doctor", "top")
"""Those told here of variables that set nothing; ``serve`` logs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="kvloop", description="Carry KV from turn to turn between vLLM workers.")
    parser.add_argument("--version", action="version", version=f"kvloop {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for name, (module, summary) in _COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            if argv[:1] == [name]:
                importlib.import_module(module).add_arguments(command)
        args = parser.parse_args(argv)
        if args.command in _READ_SETTINGS:
            for line in unknown_variables(os.environ):
                print(f"kvloop: {line}", file=sys.stderr)
        module, _ = _COMMANDS[args.command]
        return int(importlib.import_module(module).main(args))
    except ConfigError as error:
        print(f"kvloop: {error}", file=sys.stderr)
        return 2
    except SettingsError as error:
        print(f"kvloop: {not_json(error)}", file=sys.stderr)
        return 2
    except ValidationError as error:
        for problem in problems(error):
            print(f"kvloop: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvloop: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
