"""Strike a running site with one fault after the other, and say what each cost: ``python tests/faults/faults.py``.

Real Envoy, two real ext_proc and four simulated workers serve clients of multi-turn conversations all the time. After each
fault a fresh conversation must be served; then the load pauses, and nothing may be left behind. Exit status 1 says that a
text was wrong, a request hung or failed that need not, or something leaked.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fault_checks import Checks
from fault_kinds import EVERY_KIND, Drill, Kind, MayFail
from fault_load import Load, Record, Verdict
from fault_site import HANDLE_TTL_SECONDS, LEASE_SECONDS, FaultSite

SETTLING_SECONDS = 3.0
"""Load before the first fault, so that all parts have done everything once."""


@dataclass
class Result:
    """What one fault, or all of a kind, did. ``complaints`` are what may not be."""

    kind: str
    injected: int = 1
    requests: int = 0
    wrong: int = 0
    hung: int = 0
    cut: int = 0
    """Requests that failed as is the fault's nature."""
    failed: int = 0
    """Requests that failed although they need not have."""
    leaked: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether all was as it must be."""
        return not (self.wrong or self.hung or self.failed or self.leaked or self.complaints)

    def add(self, other: Result) -> None:
        """Sum up."""
        for name in ("injected", "requests", "wrong", "hung", "cut", "failed", "leaked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.complaints += other.complaints


class Run:
    """A site under load, to be struck. A context manager."""

    def __init__(self, directory: Path, seed: int, *, pace: float = 1.0) -> None:
        self.site = FaultSite(directory)
        self.pace = pace
        self.seed = seed
        self.dice = random.Random(seed)
        self.load = Load(self.site.port, seed)
        self.checks = Checks(self.site)

    def __enter__(self) -> Self:
        self.site.__enter__()
        try:
            self.load.start()
            time.sleep(SETTLING_SECONDS)
            self._pause()
            self.load.take_records()
            self.checks.leaks(counts_streams=False)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.load.stop()
        self.site.__exit__()

    def strike(self, kind: Kind) -> Result:
        """Inject one fault under load and see what comes of it."""
        result = Result(kind.name)
        drill = Drill(self.site, self.load, random.Random(self.dice.getrandbits(64)), self.pace)
        if kind.strikes_workers:
            self.site.wait_until_routable()  # or nobody might be left, with the others kept aside since the last fault
        self.load.go_on()
        time.sleep(drill.dice.uniform(0.4, 1.2))
        self.checks.note_workers()
        struck_at = time.monotonic()
        try:
            kind.strike(drill)
        except (AssertionError, OSError) as error:
            result.complaints.append(f"{kind.name}: {error}")
        over_at = time.monotonic()
        self._serve_the_next(kind, result)
        time.sleep(drill.dice.uniform(0.2, 0.6))
        self._pause()
        for record in self.load.take_records():
            self._count(record, result, kind, drill, (struck_at, over_at))
        leaks = self.checks.leaks(counts_streams=kind.may_fail is MayFail.NONE and not kind.restarts and kind.is_envoys)
        result.leaked += len(leaks)
        result.complaints += leaks
        wrongs = self.checks.wrongs()
        if wrongs:
            result.wrong += sum(wrongs.values())
            result.complaints.append(f"the workers counted {wrongs}")
        return result

    def let_everything_expire(self) -> Result:
        """Wait until no handle and no lease can live any more: then the workers hold nothing."""
        result = Result("time passes", injected=0)
        time.sleep(max(HANDLE_TTL_SECONDS, LEASE_SECONDS) + 1.0)
        for look in (self.checks.pins, self.checks.free_blocks):
            left = look()
            result.leaked += len(left)
            result.complaints += left
        return result

    # --- inside -----------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self.load.pause()
        self.site.until(lambda: not self.load.under_way, "all clients finish their turns", 60.0)

    def _serve_the_next(self, kind: Kind, result: Result) -> None:
        for record in self.load.one_conversation(self.dice.getrandbits(64)):
            if record.verdict is not Verdict.RIGHT:
                result.complaints.append(f"{kind.name}: the next request was not served: {record.what}")

    def _count(self, record: Record, result: Result, kind: Kind, drill: Drill, window: tuple[float, float]) -> None:
        struck_at, over_at = window
        result.requests += 1
        result.wrong += record.verdict is Verdict.WRONG
        result.hung += record.verdict is Verdict.HUNG
        if record.verdict in (Verdict.WRONG, Verdict.HUNG):
            result.complaints.append(f"{kind.name}: {record.verdict}: {record.what}")
        if record.verdict is Verdict.FAILED:
            at_the_time = record.ended_at >= struck_at and record.sent_at <= over_at
            if at_the_time and self._may_fail(record, kind, drill):
                result.cut += 1
            else:
                result.failed += 1
                result.complaints.append(
                    f"{kind.name}: failed and need not have: {record.what}"
                    f" (sent {record.sent_at - struck_at:+.2f} s, ended {record.ended_at - struck_at:+.2f} s from the blow,"
                    f" {record.ended_at - over_at:+.2f} s from its end)"
                )

    def _may_fail(self, record: Record, kind: Kind, drill: Drill) -> bool:
        """Tell whether it is in the nature of the fault; of a decode worker's, only requests that went to it may."""
        if kind.may_fail is MayFail.NONE:
            return False
        if drill.struck not in self.site.decode or not record.request_id:
            return True
        upstream = self.site.until(lambda: self.site.upstream_of(record.request_id), "Envoy logs the request")
        return upstream in ("-", f"127.0.0.1:{drill.struck.port}")


def schedule(seed: int) -> Iterator[Kind]:
    """Yield kinds for ever: all of them in a drawn order, then all again in another."""
    dice = random.Random(f"schedule-{seed}")
    while True:
        kinds = list(EVERY_KIND)
        dice.shuffle(kinds)
        yield from kinds


def run(directory: Path, *, seed: int, seconds: float, say: Callable[[str], None]) -> list[Result]:
    """Strike until the time is over, the last fault's checks included; return one result per kind."""
    results: dict[str, Result] = {}
    started = time.monotonic()
    say(f"seed {seed}: starting Envoy, 2 ext_proc, 2 P and 2 D")
    with Run(directory, seed) as running:
        for kind in schedule(seed):
            elapsed = time.monotonic() - started
            if elapsed > seconds - HANDLE_TTL_SECONDS and results:
                break
            result = running.strike(kind)
            state = "ok" if result.is_good else "NOT GOOD"
            say(
                f"{time.monotonic() - started:5.0f} of {seconds:.0f} s  {kind.name:<30} {result.requests:4} requests,"
                f" {result.cut} cut: {state}"
            )
            for complaint in result.complaints:
                say(f"      {complaint}")
            if kind.name in results:
                results[kind.name].add(result)
            else:
                results[kind.name] = result
        result = running.let_everything_expire()
        results[result.kind] = result
        for complaint in result.complaints:
            say(f"      {complaint}")
    return list(results.values())


def table(results: list[Result]) -> str:
    """Return the results for people."""
    columns = ("times", "requests", "wrong", "hung", "cut", "failed", "leaked")
    lines = [f"{'fault':<30}" + "".join(f"{column:>10}" for column in columns)]
    total = Result("all", injected=0)
    for result in results:
        total.add(Result(**{**vars(result), "complaints": []}))
    for result in (*sorted(results, key=lambda result: result.kind), total):
        numbers = (
            *(result.injected, result.requests, result.wrong, result.hung, result.cut, result.failed, result.leaked),
        )
        lines.append(f"{result.kind:<30}" + "".join(f"{number:>10}" for number in numbers))
    return "\n".join(lines)


LEGEND = "cut: requests on the part that was struck. failed: requests that need not have failed."


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, starting and stopping included")
    parser.add_argument("--seed", type=int, default=1, help="of every choice: which faults, when, what clients say")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvloop-faults-") as directory:
        results = run(Path(directory), seed=args.seed, seconds=args.seconds, say=lambda text: print(text, flush=True))
    print(f"\n{table(results)}\n{LEGEND}")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
