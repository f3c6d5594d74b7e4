"""One measured run: the load generator against what stands in front of a site, and what came of it."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from bench.site import HOST
from bench.traffic import DRAIN_SECONDS, TrafficConfig, config_json
from workers.supervision import StackError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.site import Site

POLL_SECONDS: Final = 0.2
_numbers: Final = itertools.count(1)


def run_traffic(
    site: Site,
    port: int,
    *,
    seconds: float,
    seed: int,
    tell: Callable[[str], None],
    profile: dict[str, Any] | None = None,
    trace: str | None = None,
    prefill_port: int | None = None,
    max_turns: int | None = None,
) -> dict[str, Any]:
    """Send traffic to ``port`` for so long, and return the generator's result; raises ``StackError`` if it fails.

    With ``prefill_port`` the generator does both legs itself. ``tell`` gets a line about how it goes, once a second.
    """
    number = next(_numbers)
    result = site.directory / f"traffic-{number}-result.json"
    config = TrafficConfig(
        host=HOST,
        port=port,
        seconds=seconds,
        seed=seed,
        profile=profile,
        trace=trace,
        prefill_port=prefill_port,
        watched=site.watched,
        result=str(result),
        max_turns=max_turns,
    )
    path = site.directory / f"traffic-{number}.json"
    path.write_bytes(config_json(config))
    argv = (sys.executable, "-m", "bench.traffic", str(path))
    generator = site.component(f"traffic-{number}", argv, cores=site.load_cores)
    generator.start()
    deadline = time.monotonic() + 2 * seconds + 2 * DRAIN_SECONDS
    told = ""
    try:
        while generator.alive() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            last = generator.output().rstrip().rpartition("\n")[2]
            if last.startswith("{") and last != told:
                told = last
                tell(_as_line(orjson.loads(last)))
        if not result.exists():
            raise generator.death() if not generator.alive() else StackError("the load generator did not end")
    finally:
        generator.stop()
    return dict(orjson.loads(result.read_bytes()))


def _as_line(told: dict[str, Any]) -> str:
    ttft = told["ttft_ms"].get("p50", 0)
    return (
        f"{told['second']:>4} s  {told['turns']} turns, {told['in_flight']} in flight, {told['failed']} failed,"
        f" {told['chunks_per_second']} chunks/s, TTFT p50 {ttft:.1f} ms"
    )
