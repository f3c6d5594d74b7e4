"""What several processes tell is told as one."""

from __future__ import annotations

import pytest

from extproc.metrics_sum import MetricsSum
from extproc.processes import combined

ONE = """# HELP a_total Count.
# TYPE a_total counter
a_total{reason="x"} 3.0
# HELP t_seconds Time.
# TYPE t_seconds histogram
t_seconds_bucket{le="1.0"} 2.0
t_seconds_bucket{le="+Inf"} 3.0
t_seconds_count 3.0
t_seconds_sum 4.0
# HELP live Now.
# TYPE live gauge
live 5.0
# HELP kvloop_store_up Up.
# TYPE kvloop_store_up gauge
kvloop_store_up 1.0
# HELP kvloop_build_info Info.
# TYPE kvloop_build_info gauge
kvloop_build_info{version="1"} 1.0
"""
TWO = ONE.replace('reason="x"} 3.0', 'reason="y"} 4.0').replace("kvloop_store_up 1.0", "kvloop_store_up 0.0")


def lines(exposition: bytes) -> set[str]:
    return {line for line in exposition.decode().splitlines() if not line.startswith("#")}


def test_metrics_are_added_up() -> None:
    told = lines(MetricsSum().exposition([ONE, TWO, ONE]))
    assert {'a_total{reason="x"} 6.0', 'a_total{reason="y"} 4.0'} <= told
    assert {'t_seconds_bucket{le="1.0"} 6.0', "t_seconds_count 9.0", "t_seconds_sum 12.0", "live 15.0"} <= told
    assert {"kvloop_store_up 0.0", 'kvloop_build_info{version="1"} 1.0'} <= told


def test_one_process_s_metrics_are_its_own() -> None:
    assert lines(MetricsSum().exposition([ONE])) == lines(ONE.encode())


def test_what_an_ended_process_counted_stays_and_what_it_held_does_not() -> None:
    counted = MetricsSum()
    counted.add_ended(ONE)
    counted.add_ended(ONE)
    assert lines(counted.exposition([])) == {
        *('a_total{reason="x"} 6.0', 't_seconds_bucket{le="1.0"} 4.0', 't_seconds_bucket{le="+Inf"} 6.0'),
        *("t_seconds_count 6.0", "t_seconds_sum 8.0"),
    }
    assert 'a_total{reason="x"} 9.0' in lines(counted.exposition([ONE]))


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (1, 2.5, 3.5),
        (True, False, True),
        (False, False, False),
        ("a", "b", "a"),
        ([1], [2], [1, 2]),
        ({"n": 1, "a": [1]}, {"n": 2, "b": 3}, {"n": 3, "a": [1], "b": 3}),
        (None, 1, None),
    ],
)
def test_answers_are_combined(one, other, together) -> None:
    assert combined(one, other) == together
