"""The script of the demo's chat: one pasted document, then questions about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from workers.demo import handbook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTIONS: Final = tuple(
    f"{question} Answer in one sentence."
    for question in (
        "How many nests were counted in the best year?",
        "Why are dogs not allowed between March and August?",
        "What does the station measure?",
        "Where does drinking water come from?",
        "What is the name of the boat?",
        "What is the Marigold?",
        "How long may visitors stay?",
        "Which channel does the emergency radio listen on?",
    )
)
"""One per turn; the first is asked under the document. The small default model gets the first five right."""

INTRODUCTION: Final = "Here is the handbook of the station I am going to work at. Read it, then answer my questions."


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str

    def as_json(self) -> dict[str, str]:
        """Spell the message as the OpenAI chat API does."""
        return {"role": self.role, "content": self.content}


def sections() -> Iterator[str]:
    """Yield the handbook's sections, numbered, without end: a long document is the handbook read again."""
    texts = handbook.TEXT.strip().split("\n\n")
    for number in count():
        heading, *lines = texts[number % len(texts)].splitlines()
        yield f"{number + 1}. {heading}\n{' '.join(lines)}"


def document(tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return the title and as many sections as come nearest to ``tokens``, one at the least.

    ``count_tokens`` is the model's own count of a text. Whole sections only: the size is met to about 100 tokens.
    """
    text = handbook.TITLE
    size = count_tokens(text)
    for section in sections():
        section_size = count_tokens("\n\n" + section)
        if text != handbook.TITLE and size + section_size / 2 > tokens:
            return text
        text += "\n\n" + section
        size += section_size
    raise AssertionError  # sections never end


def next_messages(pasted: str, answers: list[str]) -> list[Message]:
    """Return the next turn's messages: the questions so far, each with the answer really given, and one more."""
    messages: list[Message] = []
    for turn, question in enumerate(QUESTIONS[: len(answers) + 1]):
        opening = f"{INTRODUCTION}\n\n{pasted}\n\n" if turn == 0 else ""
        messages.append(Message("user", opening + question))
        messages += [Message("assistant", answers[turn])] if turn < len(answers) else []
    return messages
