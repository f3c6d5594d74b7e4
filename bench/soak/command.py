"""``kvloop bench soak``."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.soak.world import MUST_BE_ZERO, soak

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the soak."""
    parser.add_argument("--turns", type=int, default=20_000, help="requests to play (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed plays the same turns (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="share the turns among processes, seeds counting up (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")


def main(args: argparse.Namespace) -> int:
    """Play, tell, and return 1 if anything happened that must not."""
    started = time.perf_counter()
    results = _play_all(args.turns, args.seed, args.jobs)
    result = combine(results, time.perf_counter() - started)
    if args.json is not None:
        write_json(args.json, {**result, "machine": machine()})
    print(as_text(result))
    return 0 if result["is_clean"] else 1


def combine(results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Add up the results of several seeds."""
    total: dict[str, Any] = {"is_clean": all(result["is_clean"] for result in results)}
    for name, value in results[0].items():
        if isinstance(value, dict):
            total[name] = dict(sum((Counter(result[name]) for result in results), Counter()))
        elif type(value) is int:
            total[name] = sum(result[name] for result in results)
    seeds = [result["seed"] for result in results]
    speed = {"seconds": round(seconds, 1), "turns_per_second": round(total["turns"] / seconds, 1)}
    return {**total, "seed": seeds[0], "seeds": seeds, **speed}


def as_text(result: dict[str, Any]) -> str:
    """Return the result for people."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items()))
    faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(result["faults"].items()))
    acts = ", ".join(f"{count} {act}" for act, count in sorted(result["acts"].items()))
    lines = [
        f"{result['turns']} turns, seeds {result['seeds']}: {result['seconds']} s ({result['turns_per_second']}/s)",
        f"  outcomes: {outcomes}",
        f"  clients:  {acts}",
        f"  faults:   {faults or 'none'}",
        "  must be 0: " + ", ".join(f"{name}={result[name]}" for name in MUST_BE_ZERO),
        "nothing happened that must not" if result["is_clean"] else "VIOLATED",
    ]
    return "\n".join(lines)


def _play_all(turns: int, seed: int, jobs: int) -> list[dict[str, Any]]:
    if jobs == 1:
        return [_play(turns, seed, tells=True)]
    share = -(-turns // jobs)
    # Leaving by way of the pool's exit ends the processes, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.starmap(_play, [(share, seed + job, job == 0) for job in range(jobs)])


def _play(turns: int, seed: int, tells: bool) -> dict[str, Any]:  # noqa: FBT001 - starmap passes by position
    line = ProgressLine()
    started = time.perf_counter()

    def progress(done: int, wrong: int) -> None:
        speed = done / (time.perf_counter() - started)
        line.tell(f"soak: {done}/{turns} turns, {wrong} with wrong KV, {speed:.0f} turns/s")

    result = soak(turns, seed, progress=progress if tells else lambda _done, _wrong: None)
    line.end()
    return result.as_json()
