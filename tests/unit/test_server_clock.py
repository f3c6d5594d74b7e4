"""Deadlines cross from one process to another by way of a server whose clock may do anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.server_clock import ServerClock

WINDOW_SECONDS = 480.0
ROUND_TRIP_SECONDS = 0.25


def clock() -> ServerClock:
    return ServerClock(WINDOW_SECONDS, ROUND_TRIP_SECONDS)


def test_nothing_is_known_before_the_first_answer() -> None:
    assert not clock().is_known


def test_a_slow_answer_teaches_nothing() -> None:
    asked = clock()
    asked.note(10.0, 5000.0, 10.3)
    assert not asked.is_known


def test_a_steady_server_costs_a_deadline_one_round_trip_each_way() -> None:
    asked = clock()
    asked.note(10.0, 5000.0, 10.1)
    assert asked.is_known
    assert asked.to_server(110.0) == 110.0 + 5000.0 - 10.1
    assert asked.from_server(5100.0) == 5100.0 - (5000.0 - 10.0)


def test_a_step_is_forgotten_after_two_windows() -> None:
    asked = clock()
    asked.note(0.0, 1000.0, 0.0)
    asked.note(1.0, 901.0, 1.0)
    assert asked.from_server(asked.to_server(100.0)) == 0.0
    for second in range(2, int(2 * WINDOW_SECONDS) + 4):
        asked.note(second, second + 900.0, second)
    assert asked.from_server(asked.to_server(2000.0)) == 2000.0


def test_after_a_long_silence_only_the_new_answers_count() -> None:
    asked = clock()
    asked.note(0.0, 1000.0, 0.0)
    asked.note(5000.0, 5100.0, 5000.0)
    assert asked.from_server(asked.to_server(5400.0)) == 5400.0


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """Seconds after seconds in which a server is asked: (own time, its clock's lead then, the answer's travelling time)."""
    now, lead = draw(st.floats(0, 1e6)), draw(st.floats(-1e6, 1e6))
    history = []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.floats(0.5, 60.0))
        lead += draw(st.sampled_from([0.0, 0.0, 0.0, 1.0, -1.0, 3600.0, -3600.0]))
        history.append((now, lead, draw(st.floats(0.0, 0.4))))
    return history


@given(histories(), st.floats(0.0, 450.0), st.data())
def test_hazard_45_no_deadline_ever_moves_to_a_later_moment(
    history: list[tuple[float, float, float]], lifetime: float, data: st.DataObject
) -> None:
    """One process writes a deadline, another reads it in time; the server's clock steps before, between and after."""
    writer, reader = clock(), clock()
    written_at = data.draw(st.integers(0, len(history) - 1))
    deadline = told = None
    for index, (now, lead, travel) in enumerate(history):
        for process in (writer, reader):
            process.note(now, now + travel / 2 + lead, now + travel)
        if index == written_at and writer.is_known:
            deadline = now + travel + lifetime
            told = writer.to_server(deadline)
            if travel <= ROUND_TRIP_SECONDS:
                assert told <= deadline + lead + 1e-6, "the server would let it live too long"
        if told is not None and deadline is not None and now + travel <= deadline:
            assert reader.from_server(told) <= deadline + 1e-6
