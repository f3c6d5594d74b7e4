"""The mark between the roles: it survives the orchestrator, says whose tokens P prefilled, and believes nothing strange."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import FOR_DECODE

from extproc import proof
from extproc.prompt_mark import MARK_KEY, PromptMark, put_mark, take_mark

PARAMS = orjson.dumps(FOR_DECODE | {"remote_host": "10.0.0.1"})
PROMPT = list(range(100))
ids = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def marked(prompt: list[int], receipt: str = "outcome=cold") -> tuple[dict[str, Any], PromptMark]:
    """The mark of a prompt as it travels, and as it is read again."""
    params = put_mark(PARAMS, prompt, receipt)
    _, mark = take_mark(params)
    assert mark is not None
    return orjson.loads(params)[MARK_KEY], mark


@given(ids)
def test_the_mark_comes_off_without_a_trace(prompt: list[int]) -> None:
    params, mark = take_mark(put_mark(PARAMS, prompt, "outcome=cold, reason=nothing_kept"))
    assert params == PARAMS
    assert mark is not None
    assert (mark.tokens, mark.host, mark.receipt) == (len(prompt), "10.0.0.1", "outcome=cold, reason=nothing_kept")


@given(ids, ids)
def test_the_mark_agrees_with_what_goes_on_from_the_prompt(prompt: list[int], generated: list[int]) -> None:
    _, mark = marked(prompt)
    held = proof.fingerprint(prompt + generated)
    assert mark.agrees(held, None, proof.prompt_end(prompt))
    assert mark.agrees(held, prompt)
    assert not mark.agrees(held, None)


@given(ids, ids)
def test_told_d_s_prompt_the_mark_agrees_only_with_the_same(prompt: list[int], other: list[int]) -> None:
    _, mark = marked(prompt)
    assert mark.agrees(proof.fingerprint(other), other) is (prompt == other)


@pytest.mark.parametrize("generated", [0, 2, 50])
@pytest.mark.parametrize("at", [0, 31, 32, 95, 96, 99])
def test_a_prompt_that_differs_in_one_token_does_not_agree_wherever_it_stands(at: int, generated: int) -> None:
    _, mark = marked(PROMPT)
    other = [*PROMPT[:at], 9999, *PROMPT[at + 1 :]]
    held = proof.fingerprint(other + list(range(generated)))
    assert not mark.agrees(held, None, proof.prompt_end(other))


@pytest.mark.parametrize("tokens", [99, 101, 132])
def test_a_prompt_of_another_length_does_not_agree(tokens: int) -> None:
    _, mark = marked(PROMPT)
    other = [*PROMPT, *PROMPT][:tokens]
    assert not mark.agrees(proof.fingerprint([*other, 7]), None, proof.prompt_end(other))


def test_p_s_host_is_put_back_where_the_orchestrator_overwrote_it() -> None:
    travelling = orjson.loads(put_mark(PARAMS, PROMPT, "")) | {"remote_host": "envoy.example"}
    params, _ = take_mark(orjson.dumps(travelling))
    assert params == PARAMS


def test_parameters_without_a_host_get_none() -> None:
    params, _ = take_mark(put_mark(orjson.dumps(FOR_DECODE), PROMPT, ""))
    assert params == orjson.dumps(FOR_DECODE)


def test_parameters_without_a_mark_stay_as_they_are() -> None:
    assert take_mark(PARAMS) == (PARAMS, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"tokens": "100"},
        {"tokens": True},
        {"tokens": -28},
        {"tokens": 0},
        {"tokens": 101},
        {"tokens": 4},
        {"chunks": ""},
        {"tail": []},
        {"chunks": "not base64"},
        {"tail": [1, "2"]},
        {"host": None},
        {"receipt": "a\r\nset-cookie: b"},
        {"receipt": "ö"},
        {"receipt": "x" * 501},
    ],
    ids=str,
)
def test_a_strange_mark_is_none_and_never_reaches_d(changes: dict[str, Any]) -> None:
    travelling, _ = marked(PROMPT)
    params, mark = take_mark(orjson.dumps(orjson.loads(PARAMS) | {MARK_KEY: travelling | changes}))
    assert (params, mark) == (PARAMS, None)


@pytest.mark.parametrize("value", [None, [], "x", {}])
def test_a_mark_that_is_none_at_all_is_taken_out(value: Any) -> None:
    assert take_mark(orjson.dumps(orjson.loads(PARAMS) | {MARK_KEY: value})) == (PARAMS, None)
