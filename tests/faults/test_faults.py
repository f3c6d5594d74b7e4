"""The short drill: most kinds of faults once, on one site under load. ``make faults`` runs all of them, over and over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_kinds import EVERY_KIND
from fault_load import Got, Verdict, judge
from faults import Result, Run, schedule, table

SEED = 20
KINDS = (
    *("ext_proc killed", "Envoy killed", "P killed", "ext_proc paused", "clients leave", "streams cancelled"),
    *("slow clients", "half-open peers of ext_proc", "no space for ext_proc's logs", "no descriptors for ext_proc"),
    "D killed",
)
"""Those that take long are left to the long run: other parts paused or terminated, half-open clients, Envoy's own limits."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with Run(tmp_path_factory.mktemp("faults"), SEED, pace=0.5) as run:
        yield run


@pytest.mark.parametrize("kind", [next(kind for kind in EVERY_KIND if kind.name == name) for name in KINDS], ids=KINDS)
def test_a_fault_costs_no_more_than_it_must_and_leaves_nothing_behind(running: Run, kind) -> None:
    result = running.strike(kind)
    assert result.is_good, "\n".join([*result.complaints, running.site.logs()])
    assert result.requests > 0, "nobody was there to notice"


def test_afterwards_nothing_is_pinned_once_its_time_is_over(running: Run) -> None:
    result = running.let_everything_expire()
    assert result.is_good, result.complaints


# --- the drill itself -----------------------------------------------------------------------------------------------


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text.encode() + b'"}}]}\n\n'


DONE = b"data: [DONE]\n\n"
RETRY = {"retry-after": "1"}
ERROR = b'{"error":{"message":"try again"}}'


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (Got(200, body=event("one ") + event("two") + DONE), Verdict.RIGHT),
        (Got(200, body=event("one ") + event("three") + DONE), Verdict.WRONG),
        (Got(200, body=event("one ") + event("two")), Verdict.WRONG),
        (Got(200, body=event("one ") + DONE), Verdict.WRONG),
        (Got(200, body=event("one ") + event("tw")[:-9], broken="reset"), Verdict.FAILED),
        (Got(200, body=event("two"), broken="reset"), Verdict.WRONG),
        (Got(200, body=event("one ") + b'data: {"error":{}}\n\n' + DONE), Verdict.FAILED),
        (Got(200, body=event("one two").replace(b"delta", b"kvloop_digest") + DONE), Verdict.WRONG),
        (Got(503, RETRY, ERROR), Verdict.FAILED),
        (Got(504, {}, ERROR), Verdict.FAILED),
        (Got(503, {}, ERROR), Verdict.WRONG),
        (Got(503, RETRY, b"upstream connect error"), Verdict.WRONG),
        (Got(500, RETRY, ERROR), Verdict.WRONG),
        (Got(404, RETRY, ERROR), Verdict.WRONG),
        (Got(broken="refused"), Verdict.FAILED),
    ],
)
def test_the_judge_tells_right_from_failed_from_wrong(got: Got, verdict: Verdict) -> None:
    assert judge(got, "one two", streamed=True)[0] is verdict


def test_the_long_run_strikes_every_kind_before_any_twice() -> None:
    kinds = schedule(7)
    first = [next(kinds).name for _ in EVERY_KIND]
    again = [next(kinds).name for _ in EVERY_KIND]
    assert sorted(first) == sorted(again) == sorted(kind.name for kind in EVERY_KIND)
    assert first != again
    assert set(KINDS) <= set(first)


def test_the_table_sums_up() -> None:
    bad = Result("D killed", requests=5, cut=2, leaked=1, complaints=["D still has live_pins=1"])
    good = Result("Envoy killed", requests=7, cut=3)
    assert (good.is_good, bad.is_good) == (True, False)
    last = table([bad, good]).splitlines()[-1].split()
    assert last == ["all", "2", "12", "0", "0", "5", "0", "1"]
