"""JSON spelled by bytes: whatever the bytes, the text is valid, so a fuzzer gets past the parser and into what comes after it.

Every byte is a choice: which kind of value, which word, how it is spelled, how much space stands around it. Where the bytes
end, so does the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

WORDS = (
    *(
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "prompt_token_ids",
        "return_token_ids",
        "kvloop_digest",
    ),
    *("model", "messages", "content", "prompt", "stream", "n", "max_tokens", "stop", "suffix", "prompt_embeds"),
    *("", "\\", '"', '{"kv_transfer_params":1}', "]}", ",", "\n\0\x7f\u2028", "Ž🧊", "a"),
)
SCALARS = ("null", "true", "false", "0", "1", "-0", "0.10", "1E+5", "18446744073709551616", "2", "[]", "{}")
SPACES = ("", "", "", "", " ", "\n", "\t\r\n ", "  ")
MAX_DEPTH = 40


def spelled(data: bytes, members: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return a JSON object. ``members`` (names and JSON texts) are in it, unless the bytes drop, change or repeat them."""
    choices = iter(data)
    parts = []
    for name, text in members:
        match next(choices, 0) % 8:
            case 7:
                continue
            case 6:
                parts.append(_member(choices, name, _value(choices, 1)))
            case 5:
                parts += [_member(choices, name, text), _member(choices, name, _value(choices, 1))]
            case _:
                parts.append(_member(choices, name, text))
    parts += [_member(choices, _word(choices), _value(choices, 1)) for _ in range(next(choices, 0) % 6)]
    return ("{" + _space(choices) + ",".join(parts) + _space(choices) + "}").encode()


def _value(choices: Iterator[int], depth: int) -> str:
    kind = next(choices, 0)
    if kind % 4 == 0 or depth > MAX_DEPTH:
        return SCALARS[kind // 4 % len(SCALARS)]
    if kind % 4 == 1:
        return _string(_word(choices), next(choices, 0))
    count = next(choices, 0) % 4
    if kind % 4 == 2:
        inner = [_space(choices) + _value(choices, depth + 1) + _space(choices) for _ in range(count)]
        return "[" + ",".join(inner) + "]"
    return "{" + ",".join(_member(choices, _word(choices), _value(choices, depth + 1)) for _ in range(count)) + "}"


def _member(choices: Iterator[int], name: str, value: str) -> str:
    how = next(choices, 0)
    return _space(choices) + _string(name, how) + _space(choices) + ":" + _space(choices) + value + _space(choices)


def _word(choices: Iterator[int]) -> str:
    return WORDS[next(choices, 0) % len(WORDS)]


def _space(choices: Iterator[int]) -> str:
    return SPACES[next(choices, 0) % len(SPACES)]


def _string(text: str, how: int) -> str:
    """Spell a string as it is, in ASCII, or with one character escaped that need not be."""
    if how < 128 or not text:
        return json.dumps(text, ensure_ascii=bool(how & 1))
    at = how % len(text)
    units = text[at].encode("utf-16-be").hex()
    escaped = "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
    return json.dumps(text[:at])[:-1] + escaped + json.dumps(text[at + 1 :])[1:]
