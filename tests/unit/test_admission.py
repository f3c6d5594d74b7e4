"""What exceeds a bound is turned away, and whatever a request took of the load it gives back, however it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission import Load, Share
from extproc.errors import Overloaded
from extproc.settings import GatewaySettings

SETTINGS = GatewaySettings(max_requests=3, max_preparing_requests=2, request_max_total_bytes=100)


def test_more_than_the_places_there_are_is_turned_away_with_the_time_to_come_again() -> None:
    load = Load(requests=3)
    with pytest.raises(Overloaded, match="All 3 places") as refused:
        Share(load).enter(SETTINGS)
    assert (refused.value.status, refused.value.headers) == (503, (("retry-after", "1"),))
    assert load == Load(requests=3)


def test_requests_that_wait_for_their_prefill_have_a_bound_of_their_own() -> None:
    load = Load()
    first, second, third = (Share(load) for _ in range(3))
    first.enter(SETTINGS)
    second.enter(SETTINGS)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        third.enter(SETTINGS)
    first.prepared()
    third.enter(SETTINGS)
    assert load == Load(requests=3, preparing=2)


def test_bodies_have_a_bound_together() -> None:
    load = Load()
    first, second = Share(load), Share(load)
    first.hold(60, SETTINGS)
    second.hold(40, SETTINGS)
    with pytest.raises(Overloaded, match="memory"):
        second.hold(1, SETTINGS)
    first.leave()
    second.hold(60, SETTINGS)
    assert load.body_bytes == 100


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["enter", "hold", "prepared", "leave"]))))
def test_the_load_is_what_the_shares_hold_and_nothing_when_all_have_left(acts: list[tuple[int, str]]) -> None:
    load = Load()
    shares = [Share(load) for _ in range(4)]
    inside: set[int] = set()
    for number, act in acts:
        share = shares[number]
        if (act == "enter") == (number in inside):
            continue
        try:
            getattr(share, act)(*{"enter": (SETTINGS,), "hold": (7, SETTINGS)}.get(act, ()))
        except Overloaded:
            pass
        else:
            inside ^= {number} if act in ("enter", "leave") else set()
        assert load.requests == len(inside) <= SETTINGS.max_requests
        assert 0 <= load.preparing <= min(load.requests, SETTINGS.max_preparing_requests)
        assert 0 <= load.body_bytes <= SETTINGS.request_max_total_bytes
    for share in shares:
        share.leave()
        share.leave()
    assert load == Load()
