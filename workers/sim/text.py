"""The simulated model's tokenizer, chat template and "weights": text in, token ids out, and back.

Ids below 256 are bytes; then come the special tokens; then words of two syllables, each with its leading space, which is
what the model speaks. Words and bytes are what ``encode`` finds; pairs of words are tokens the model may emit although
no tokenizer would ever produce them for the same text, as real models do.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SPECIAL_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>", "<|image|>")
IM_START, IM_END, THINK, END_THINK, END_OF_TEXT, IMAGE = range(256, 256 + len(SPECIAL_TOKENS))
HIDDEN: Final = frozenset((IM_START, IM_END, END_OF_TEXT))
"""Tokens whose text a client never sees (vLLM's ``skip_special_tokens``); thinking marks are ordinary text to it."""

_SYLLABLES: Final = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiouéö"]
WORDS: Final = [f" {first}{second}" for first, second in itertools.product(_SYLLABLES, repeat=2)]
FIRST_WORD: Final = 512
FIRST_PAIR: Final = FIRST_WORD + len(WORDS)
VOCABULARY_SIZE: Final = FIRST_PAIR + len(WORDS)

_WORD: Final = " " + 2 * "[bdfghjklmnprstvz](?:[aeiou]|é|ö)"
_PIECE: Final = re.compile("|".join([*map(re.escape, SPECIAL_TOKENS), _WORD, "."]).encode(), re.DOTALL)
_ID_OF: Final = {
    **{bytes((byte,)): byte for byte in range(256)},
    **{special.encode(): 256 + index for index, special in enumerate(SPECIAL_TOKENS)},
    **{word.encode(): FIRST_WORD + index for index, word in enumerate(WORDS)},
}
_BYTES_OF: Final = {
    **{token_id: piece for piece, token_id in _ID_OF.items()},
    **{FIRST_PAIR + index: (word + WORDS[-1 - index]).encode() for index, word in enumerate(WORDS)},
}


def encode(text: str) -> list[int]:
    """Return the token ids of ``text``; special tokens spelled out in it count as such, as in Hugging Face tokenizers."""
    return [_ID_OF[piece] for piece in _PIECE.findall(text.encode("utf-8", "surrogatepass"))]


def decode(token_ids: Iterable[int], *, hide_special: bool = True) -> str:
    """Return the text of ``token_ids``. Without ``hide_special`` it is what ``encode`` takes."""
    shown = (_BYTES_OF[token] for token in token_ids if not (hide_special and token in HIDDEN))
    return b"".join(shown).decode("utf-8", "replace")


def token_string(token_id: int) -> str:
    """Return one token as text, the way logprobs name it."""
    return _BYTES_OF[token_id].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How the model answers: a fixed function of the KV it attends to, with the quirks a test asks for."""

    mean_answer_tokens: int = 24
    emits_pairs: bool = False
    """Emit tokens that ``encode`` would spell as two: retokenised history then differs from what was generated."""
    thinks: bool = False
    """Start each answer with ``<think>…</think>``, which the chat template drops from older turns."""

    def next_token(self, attended: bytes, generated: int, *, may_end: bool = True) -> int:
        """Return the next token id, given the digest of all KV attended to."""
        dice = int.from_bytes(attended[:6], "little")
        dice, ends = divmod(dice, self.mean_answer_tokens)
        if self.thinks and generated in _THINKING:
            return _THINKING[generated]
        if may_end and not ends and generated > (max(_THINKING) if self.thinks else 0):
            return IM_END
        dice, pair = divmod(dice, 3)
        first = FIRST_PAIR if self.emits_pairs and not pair else FIRST_WORD
        return first + dice % len(WORDS)


_THINKING: Final = {0: THINK, 6: END_THINK}
_THOUGHT: Final = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def render_chat(
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    drops_thoughts: bool = False,
    enable_thinking: bool = True,
) -> str:
    """Return the prompt text of a chat, in ChatML.

    With ``drops_thoughts`` the thinking of every assistant turn before the last user message is left out, as Qwen3's
    template does: so history is rewritten although the client changed nothing.
    """
    parts = []
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"<|im_start|>system\n<tools>\n{listed}\n</tools><|im_end|>\n")
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        content = _content_text(message)
        if drops_thoughts and message["role"] == "assistant" and index < last_user:
            content = _THOUGHT.sub("", content)
        is_open = continue_final_message and index == len(messages) - 1
        parts.append(f"<|im_start|>{message['role']}\n{content}" + ("" if is_open else "<|im_end|>\n"))
    if add_generation_prompt and not continue_final_message:
        parts.append("<|im_start|>assistant\n" + ("" if enable_thinking else "<think>\n\n</think>\n\n"))
    return "".join(parts)


def _content_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] if part.get("type") == "text" else "<|image|>" for part in content)
    calls = "".join(
        f"\n<tool_call>\n{call['function']['name']} {call['function']['arguments']}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    )
    return (content or "") + calls
