"""The script of the demo's chat."""

from __future__ import annotations

from itertools import islice

import pytest

from workers.demo import handbook
from workers.demo.conversation import INTRODUCTION, QUESTIONS, Message, document, next_messages, sections


def words(text: str) -> int:
    return len(text.split())


def test_the_first_turn_pastes_the_document_above_the_question() -> None:
    assert next_messages("DOCUMENT", []) == [Message("user", f"{INTRODUCTION}\n\nDOCUMENT\n\n{QUESTIONS[0]}")]


def test_a_later_turn_extends_the_messages_of_the_turn_before() -> None:
    before = next_messages("DOCUMENT", ["one"])
    assert next_messages("DOCUMENT", ["one", "two"]) == [
        *before,
        Message("assistant", "two"),
        Message("user", QUESTIONS[2]),
    ]


def test_messages_are_spelt_as_the_chat_api_does() -> None:
    assert Message("user", "hello").as_json() == {"role": "user", "content": "hello"}


def test_no_question_is_asked_twice() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS)


@pytest.mark.parametrize("tokens", [500, 2000, 10_000])
def test_the_document_has_the_asked_size_to_half_a_section(tokens: int) -> None:
    largest = max(words(section) for section in islice(sections(), 40))
    assert abs(words(document(tokens, words)) - tokens) <= largest / 2


def test_a_document_has_one_section_at_the_least() -> None:
    assert document(1, words) == f"{handbook.TITLE}\n\n{next(sections())}"


def test_a_long_document_repeats_the_handbook_under_new_numbers() -> None:
    count = len(handbook.TEXT.strip().split("\n\n"))
    texts = list(islice(sections(), count + 1))
    assert texts[0].removeprefix("1. ") == texts[count].removeprefix(f"{count + 1}. ")


def test_lines_are_wrapped_in_the_source_only() -> None:
    assert all(section.count("\n") == 1 for section in islice(sections(), 20))
