"""Run the test suites one after the other and count: exit 0 only if all ran, nothing failed and nothing was skipped.

Each suite has a time limit, and runs under a warden, so that neither a hang nor a crash leaves a process behind.
"""
# ruff: noqa: T201, INP001, S314 - a script that prints; the XML it reads is pytest's own

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = {"unit": 480, "gateway": 840, "e2e": 1200}
"""Together below an hour. Further folders below tests/ that hold tests get ``OTHER_LIMIT_SECONDS`` each."""

OTHER_LIMIT_SECONDS = 300


@dataclass
class Count:
    """What a suite's report says. ``known`` are tests of known faults that fail as they are expected to (xfail)."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    known: int = 0
    seconds: float = 0.0
    complaint: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the suite ran to its end, with tests in it, all of which passed."""
        return not self.complaint and self.passed > 0 and self.failed == 0 and self.skipped == 0


def run(suite: str, report: Path) -> Count:
    """Run one suite; its output goes to ours."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", f"tests/{suite}", f"--junitxml={report}"]
    warden = [sys.executable, "-I", "workers/warden.py", "--grace", "30", "--", *command]
    complaint = ""
    # The pipe is the order to stop: closed when the time is over, or by the kernel should this script be killed.
    with subprocess.Popen(warden, cwd=ROOT, stdin=subprocess.PIPE) as process:  # noqa: S603 - our own command
        try:
            status = process.wait(LIMIT_SECONDS.get(suite, OTHER_LIMIT_SECONDS))
            complaint = "" if status in {0, 1} else f"pytest ended with status {status}"
        except subprocess.TimeoutExpired:
            complaint = f"took longer than {LIMIT_SECONDS.get(suite, OTHER_LIMIT_SECONDS)} s and was stopped"
            process.communicate()
    count = read(suite, report)
    count.seconds = time.monotonic() - started
    count.complaint = complaint
    return count


def read(suite: str, report: Path) -> Count:
    """Count the test cases of a JUnit report."""
    if not report.exists():
        return Count(suite)
    count = Count(suite)
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            count.failed += 1
        elif (skipped := case.find("skipped")) is not None and skipped.get("type") == "pytest.xfail":
            count.known += 1
        elif skipped is not None:
            count.skipped += 1
        else:
            count.passed += 1
    return count


def main() -> int:
    """Run all suites, show the counts, say whether all is well."""
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    suites = [*LIMIT_SECONDS, *sorted(found - set(LIMIT_SECONDS))]
    counts = []
    with tempfile.TemporaryDirectory() as reports:
        for suite in suites:
            print(f"\n=== tests/{suite} ===", flush=True)
            counts.append(run(suite, Path(reports) / f"{suite}.xml"))
    print(f"\n{'suite':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'xfailed':>9}{'seconds':>9}")
    for count in counts:
        remark = count.complaint or ("" if count.is_good else "NOT GOOD: a failed, skipped or missing test")
        numbers = f"{count.passed:>8}{count.failed:>8}{count.skipped:>9}{count.known:>9}{count.seconds:>9.0f}"
        print(f"{count.suite:<10}{numbers}  {remark}")
    totals = [sum(getattr(count, name) for count in counts) for name in ("passed", "failed", "skipped")]
    print("{} passed, {} failed, {} skipped".format(*totals), flush=True)
    return 0 if all(count.is_good for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
