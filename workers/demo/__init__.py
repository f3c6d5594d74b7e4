"""``kvloop demo``: the same multi-turn chat twice on real vLLM workers behind the real Envoy, reuse off and on.

Nothing here is imported before ``preflight`` has found it installed, so that a missing part is told and not raised.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.demo.conversation import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL_NAME: Final = "SmolLM2-135M-Instruct"


def cache_directory() -> Path:
    """Return where prepared models are kept: ``KVLOOP_CACHE``, else ``kvloop`` in the user's cache directory."""
    if named := os.environ.get("KVLOOP_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help=f"model directory in Hugging Face format (default: {MODEL_NAME}, prepared once in KVLOOP_CACHE)",
    )
    parser.add_argument(
        "--prefill-cache",
        choices=("on", "off"),
        default="off",
        help="prefix caching on the prefill worker; off stands for an evicted cache or another worker (default: off)",
    )
    parser.add_argument(
        "--return",
        dest="return_mode",
        choices=("lazy", "eager"),
        default="lazy",
        help="when P reads D's KV back: lazy, at the next turn (default); eager, right after the turn, for which the"
        " prefill worker runs with prefix caching, and which is compared with lazy",
    )
    parser.add_argument(
        "--turns",
        type=_number(1, len(QUESTIONS)),
        default=4,
        metavar="N",
        help=f"questions to ask, 1 to {len(QUESTIONS)} (default: 4)",
    )
    parser.add_argument(
        "--document-tokens",
        type=_number(1, 1_000_000),
        default=3000,
        metavar="N",
        help="size of the pasted document, to the nearest section (default: 3000)",
    )
    parser.add_argument(
        "--topology",
        choices=("gateway", "intercept"),
        default="gateway",
        help="gateway: through kvloop's own (default); intercept: through --orchestrator, with kvloop between it and P and D",
    )
    parser.add_argument(
        "--orchestrator",
        choices=("vllm-router",),
        default="vllm-router",
        help="whose P/D orchestrator the intercept topology is shown with; installed from PyPI once (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="FILE",
        default=Path("kvloop-demo.png"),
        help="write the chart there (PNG; default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")


def main(args: argparse.Namespace) -> int:
    """Run the demo. Exit status 0: it worked; 1: it did not; 2: something is missing here; 130: interrupted."""
    if args.return_mode == "eager" and args.topology == "intercept":
        print("kvloop demo: --return eager is kvloop's own: another orchestrator chooses P itself", file=sys.stderr)  # noqa: T201
        return 2
    from workers.demo import preflight  # noqa: PLC0415 - see above

    model_directory = cache_directory() / MODEL_NAME
    missing = preflight.check(
        model=args.model, model_directory=model_directory, outputs=[path for path in (args.json, args.chart) if path]
    )
    if missing:
        print("kvloop demo cannot run here:", *missing, sep="\n  ", file=sys.stderr)  # noqa: T201 - a command speaks
        return 2
    from workers.demo import run  # noqa: PLC0415 - see above

    return run.run(args, model_directory)


def _number(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest} to {highest}")
        return int(text)

    return parse
