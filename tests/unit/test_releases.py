"""The release queue: in the background, at a rate, tried twice, counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import orjson
import pytest
from world import handle_params

from extproc import releases
from extproc.events import Release
from extproc.handle import read_publication
from extproc.releases import ReleaseQueue

HANDLE = read_publication(orjson.dumps(handle_params(64))).handle


def play(
    answers: Callable[[int], bool], count: int = 1, *, per_second: float = 1e6, finish: bool = True
) -> tuple[int, Counter[tuple[str, str]], float]:
    """Queue ``count`` releases and wait for them; return calls made, results counted, seconds taken."""
    calls = 0
    results: Counter[tuple[str, str]] = Counter()

    async def send(_: Release) -> bool:
        nonlocal calls
        calls += 1
        return answers(calls)

    async def run() -> float:
        loop = asyncio.get_running_loop()
        all_counted = asyncio.Event()

        def note(reason: str, result: str) -> None:
            results[reason, result] += 1
            if results.total() == count:
                all_counted.set()

        queue = ReleaseQueue(send, note, per_second=per_second, retry_after_seconds=0.01)
        started = loop.time()
        for _ in range(count):
            queue.add(Release(HANDLE, "m", "superseded"))
        running = asyncio.create_task(queue.run())
        if finish:
            await queue.finish()
        await all_counted.wait()
        assert not running.done()
        assert len(queue) == 0
        running.cancel()
        return loop.time() - started

    seconds = asyncio.run(run())
    return calls, results, seconds


def test_a_release_that_succeeds_is_sent_once() -> None:
    calls, results, _ = play(lambda _: True, 3)
    assert (calls, dict(results)) == (3, {("superseded", "freed"): 3})


def test_a_release_that_fails_is_tried_once_more() -> None:
    calls, results, _ = play(lambda call: call > 1)
    assert (calls, dict(results)) == (2, {("superseded", "freed"): 1})


def test_a_release_that_fails_twice_is_left_to_d_s_own_clock() -> None:
    calls, results, _ = play(lambda _: False)
    assert (calls, dict(results)) == (2, {("superseded", "failed"): 1})


def test_releases_start_no_faster_than_their_rate() -> None:
    _, _, seconds = play(lambda _: True, 11, per_second=100.0, finish=False)
    assert seconds >= 0.099


def test_when_the_gateway_stops_the_rate_no_longer_holds() -> None:
    calls, results, _ = play(lambda _: True, 20, per_second=0.001)
    assert (calls, dict(results)) == (20, {("superseded", "freed"): 20})


def test_a_release_that_raises_ends_no_other() -> None:
    def answer(call: int) -> bool:
        if call <= 2:
            raise RuntimeError("unforeseen")
        return True

    _, results, _ = play(answer, 3)
    assert results.total() == 3
    assert results["superseded", "freed"] >= 1


def test_beyond_the_bound_releases_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "WAITING_AT_MOST", 2)
    _, results, _ = play(lambda _: True, 5)
    assert dict(results) == {("superseded", "freed"): 2, ("superseded", "dropped"): 3}
