"""The script of the demo's chat: one pasted document, then questions about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from workers.demo import handbook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTIONS: Final = (
    "What is the station for, and who lives there? Answer in two sentences.",
    "Which levels of the batteries start and stop the generator, and how much fuel does it burn in an hour?",
    "What does the crew do when a storm warning is given? Name four things.",
    "How is the tide gauge compared with the bolt, and when is it corrected?",
    "What is each of the five books for?",
    "Who may use the station boat, and under which conditions?",
    "How does the supply ship bring its goods ashore?",
    "What must the outgoing keeper do on the last day?",
)
"""One per turn; the first is asked under the document."""

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
