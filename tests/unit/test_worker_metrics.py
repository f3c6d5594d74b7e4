"""What a worker's /metrics says of its KV memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.worker_metrics import EngineLoad, read_engine_load

VLLM_032 = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.39
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",enable_prefix_caching="True",\
engine="0",num_cpu_blocks="None",num_gpu_blocks="1024",num_gpu_blocks_override="None",sliding_window="None"} 1.0
"""


def test_capacity_usage_and_queue_are_read() -> None:
    assert read_engine_load(VLLM_032) == EngineLoad(32, 32 * 1024, 0.39, 2)


def test_of_several_engines_the_smallest_and_the_fullest_count() -> None:
    other = VLLM_032.replace('engine="0"', 'engine="1"').replace("0.39", "0.8").replace('"1024"', '"512"')
    assert read_engine_load(VLLM_032 + other) == EngineLoad(32, 32 * 512, 0.8, 2)


def test_what_is_not_told_is_not_known() -> None:
    assert read_engine_load("") == EngineLoad(None, None, 0.0, 0)
    assert read_engine_load('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n') == EngineLoad(
        16, None, 0.0, 0
    )


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x"])
def test_numbers_that_say_nothing_are_passed_over(value: str) -> None:
    assert read_engine_load(f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_waiting {value}\n").usage == 0.0


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    assert read_engine_load(text).waiting >= 0
