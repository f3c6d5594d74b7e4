"""Collections stay short: what survived is not looked at again, and goes all the same when nobody wants it any more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from extproc import garbage


class Thing:
    """Something that may refer to itself."""

    def __init__(self, *, is_cycle: bool = False) -> None:
        self.itself = self if is_cycle else None


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_survived_is_set_aside_and_goes_with_its_last_reference() -> None:
    thing = Thing()
    garbage.collect()
    assert gc.get_freeze_count() > 0
    assert not any(each is thing for each in gc.get_objects())
    seen = weakref.ref(thing)
    del thing
    assert seen() is None


def test_new_cycles_are_collected_and_old_ones_when_everything_is() -> None:
    new = weakref.ref(Thing(is_cycle=True))
    thing = Thing(is_cycle=True)
    old = weakref.ref(thing)
    garbage.collect()
    assert new() is None
    del thing
    garbage.collect()
    assert old() is not None
    garbage.collect(everything=True)
    assert old() is None


def test_collections_go_on_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(garbage, "_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(garbage, "_FULL_EVERY", 3)
    monkeypatch.setattr(garbage, "collect", lambda *, everything: done.append(everything))

    async def run() -> None:
        task = asyncio.create_task(garbage.keep_collections_short())
        while len(done) < 6:  # noqa: ASYNC110 - the test is about the waiting
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert done[:6] == [False, False, True] * 2
