"""When may two runs differ, and what is said about it."""

from __future__ import annotations

import pytest

from workers.demo.compare import ChosenToken, Comparison, compare_answers, compare_chats


def token(name: str, logprob: float = -0.1, **others: float) -> ChosenToken:
    return ChosenToken(name, logprob, {name: logprob, **others})


SAME = (token("a"), token("b"))


def test_equal_texts_are_equal() -> None:
    assert compare_answers("ab", SAME, "ab", SAME) == Comparison(
        text_equal=True, acceptable=True, reason="", largest_logprob_change=0.0
    )


def test_the_largest_change_of_a_log_probability_is_reported() -> None:
    on = (token("a", -0.1003), token("b", -0.1))
    assert compare_answers("ab", SAME, "ab", on).largest_logprob_change == pytest.approx(0.0003)


def test_a_near_tie_is_excused_and_said() -> None:
    off = (token("a"), token("b", -0.70, c=-0.701))
    on = (token("a"), token("c", -0.699, b=-0.704))
    verdict = compare_answers("ab", off, "ac", on)
    assert (verdict.text_equal, verdict.acceptable) == (False, True)
    assert verdict.reason == "token 2 is a near tie: log-probabilities agree to 0.0040 between the runs"


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (token("b", -0.70, c=-0.701), token("c", -0.680, b=-0.701)),
        (token("b", -0.70, c=-0.701), token("c", -0.700, b=-0.720)),
    ],
    ids=["its own token moved", "the other token moved"],
)
def test_a_log_probability_that_moved_is_not_excused(off: ChosenToken, on: ChosenToken) -> None:
    verdict = compare_answers("b", [off], "c", [on])
    assert not verdict.acceptable
    assert verdict.reason.startswith("token 1 differs by 0.0")


@pytest.mark.parametrize(
    ("off", "on"),
    [(token("b"), token("c", b=-0.1)), (token("b", c=-0.1), token("c"))],
    ids=["unknown to the first run", "unknown to the second run"],
)
def test_a_token_the_other_run_did_not_consider_is_not_excused(off: ChosenToken, on: ChosenToken) -> None:
    verdict = compare_answers("b", [off], "c", [on])
    assert not verdict.acceptable
    assert verdict.reason == "token 1 differs and is not among the other run's likeliest"


@pytest.mark.parametrize(("off", "on"), [(SAME, SAME[:1]), (SAME[:1], SAME)])
def test_an_answer_that_breaks_off_is_not_excused(off: tuple[ChosenToken, ...], on: tuple[ChosenToken, ...]) -> None:
    verdict = compare_answers("x" * len(off), off, "x" * len(on), on)
    assert not verdict.acceptable
    assert verdict.reason == "one answer ends after token 1, where the other goes on"


def test_empty_answers_have_no_log_probabilities_to_compare() -> None:
    assert compare_answers("", (), "", ()).largest_logprob_change is None


def test_turns_after_an_excused_one_are_not_compared_but_excused_and_flagged() -> None:
    off = [("b", [token("b", -0.7, c=-0.7)]), ("same", SAME), ("x", SAME)]
    on = [("c", [token("c", -0.7, b=-0.7)]), ("same", SAME), ("y", SAME)]
    first, second, third = compare_chats(off, on)
    assert first.acceptable
    reason = "not comparable: the two chats have different histories since turn 1"
    assert second == Comparison(text_equal=True, acceptable=True, reason=reason, largest_logprob_change=None)
    assert third == Comparison(text_equal=False, acceptable=True, reason=reason, largest_logprob_change=None)


def test_turns_after_a_wrong_answer_are_not_excused() -> None:
    verdicts = compare_chats([("b", [token("b")]), ("d", SAME)], [("c", [token("c")]), ("e", SAME)])
    assert [verdict.acceptable for verdict in verdicts] == [False, False]


def test_equal_chats_are_compared_turn_by_turn() -> None:
    chat = [("ab", SAME), ("ab", SAME)]
    assert [verdict.text_equal for verdict in compare_chats(chat, chat)] == [True, True]
