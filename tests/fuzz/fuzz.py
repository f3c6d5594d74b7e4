"""Fuzz every target for a while, side by side, and say what was found: ``python tests/fuzz/fuzz.py --seconds 60``.

New inputs go to a temporary folder and are forgotten. An input that breaks something is kept under ``crashes/``; once the
fault is mended, it belongs in ``corpus/`` and in a unit test. Exit status 1 says that there is one.
"""
# ruff: noqa: S603 - it starts itself

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TARGETS = ("answer", "request", "handle", "connection")
"""As in ``fuzz_targets``, which is only imported where it is instrumented."""

_RUNS = re.compile(r"^#(\d+)\t.*?\bft: (\d+)", re.MULTILINE)
PROGRESS_SECONDS = 5.0
INPUT_SECONDS = 30
"""Longer on one input (of 4 KiB at most) is a fault, even on a busy machine."""


@dataclass(frozen=True)
class Found:
    """What fuzzing one target gave. ``features`` counts the combinations of branches seen."""

    target: str
    runs: int
    features: int
    error: str
    crashes: list[Path]

    @property
    def is_good(self) -> bool:
        """Whether it ran, and nothing broke."""
        return self.runs > 0 and not self.error


def fuzz(targets: tuple[str, ...], seconds: int, seed: int, crashes: Path, say: Callable[[str], None]) -> list[Found]:
    """Fuzz these targets at the same time, for this many seconds each."""
    crashes.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        started = time.monotonic()
        running = [(target, _start(target, seconds, seed, crashes, Path(temporary))) for target in targets]
        try:
            told = 0.0
            while any(process.poll() is None for _, process in running):
                time.sleep(0.2)
                elapsed = time.monotonic() - started
                if elapsed - told >= PROGRESS_SECONDS:
                    told = elapsed
                    done = sum(_progress(Path(temporary) / f"{target}.log")[0] for target in targets)
                    say(f"fuzzing {', '.join(targets)}: {elapsed:.0f} of {seconds} s, {done} inputs")
        finally:
            for _, process in running:
                process.kill()
                process.wait()
        return [_found(target, process, crashes, Path(temporary)) for target, process in running]


def _start(target: str, seconds: int, seed: int, crashes: Path, temporary: Path) -> subprocess.Popen[bytes]:
    new = temporary / target
    new.mkdir()
    command = [sys.executable, str(HERE / "fuzz_one.py"), target, f"-max_total_time={seconds}", f"-seed={seed}"]
    command += ["-max_len=4096", f"-timeout={INPUT_SECONDS}", f"-artifact_prefix={crashes}/{target}-"]
    with (temporary / f"{target}.log").open("wb") as log:
        return subprocess.Popen([*command, str(new), str(HERE / "corpus" / target)], stdout=log, stderr=log)


def _progress(log: Path) -> tuple[int, int]:
    found = _RUNS.findall(log.read_text(errors="replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def _found(target: str, process: subprocess.Popen[bytes], crashes: Path, temporary: Path) -> Found:
    log = temporary / f"{target}.log"
    runs, features = _progress(log)
    error = "" if process.returncode == 0 else log.read_text(errors="replace")[-3000:]
    return Found(target, runs, features, error, sorted(crashes.glob(f"{target}-*")) if error else [])


def main(argv: list[str] | None = None) -> int:
    """Fuzz, print a table, say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="how long, all targets at the same time")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer's dice")
    args = parser.parse_args(argv)
    targets = tuple(args.targets) or TARGETS
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    results = fuzz(targets, args.seconds, args.seed, HERE / "crashes", lambda text: print(text, flush=True))
    print(f"\n{'target':<12}{'inputs':>10}{'features':>10}  result")
    for found in results:
        kept = ", ".join(map(str, found.crashes))
        print(f"{found.target:<12}{found.runs:>10}{found.features:>10}  {'ok' if found.is_good else f'BROKEN: {kept}'}")
    for found in results:
        if found.error:
            print(f"\n--- {found.target}\n{found.error}")
    return 0 if all(found.is_good for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
