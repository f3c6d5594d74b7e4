"""Read a client's request body: check it, and take out what no client may send.

A client's own transfer parameters would let it point a worker at any host (server-side request forgery, vllm#47843) or at
somebody else's KV, so they are removed on every handled path, however they are spelled or nested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from extproc import splice
from extproc.endpoints import Dialect, Endpoint
from extproc.errors import ClientError

TRANSFER_FIELD: Final = "kv_transfer_params"
FORBIDDEN_FIELDS: Final = frozenset({TRANSFER_FIELD, "ec_transfer_params"})
MAX_MEMBERS: Final = 10_000
"""Each costs 250 bytes and a microsecond or two on every leg, in front of
everybody else; OpenAI's and vLLM's request models have about a hundred."""
EXTRA_ARGUMENTS_FIELD: Final = "vllm_xargs"
"""vLLM merges this object into the sampling parameters' extra arguments, where the fields above would count."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A client's request: ``raw`` is its JSON text without forbidden fields, ``fields`` the same text parsed."""

    endpoint: Endpoint
    raw: bytes
    fields: dict[str, Any]
    forbidden_fields_removed: int
    transfer_params: bytes | None = None
    """The ``kv_transfer_params`` that were among them (JSON text), if they were an object."""

    @property
    def model(self) -> str:
        """The model asked for; empty when the client leaves the choice to the worker."""
        model = self.fields.get("model")
        return model if isinstance(model, str) else ""

    @property
    def wants_token_ids(self) -> bool:
        """Whether the client itself asked for the token ids kvloop would otherwise hide."""
        return is_true(self.fields.get("return_token_ids"))

    @property
    def token_id_prompt(self) -> list[int] | None:
        """The prompt, if the client sent it as token ids that no worker would change before use."""
        prompt = self.fields.get("prompt")
        if (
            self.endpoint.dialect is Dialect.COMPLETIONS
            and isinstance(prompt, list)
            and prompt
            and all(type(token) is int and 0 <= token < 2**32 for token in prompt)
            and self.fields.get("truncate_prompt_tokens") is None
            and self.fields.get("suffix") is None
        ):
            return prompt
        return None


def parse_request(endpoint: Endpoint, body: bytes) -> ApiRequest:
    """Parse a request body; raises ``ClientError`` (400) unless it is a JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # vLLM's parser accepts more (NaN, UTF-16); what kvloop cannot read it cannot clear of forbidden fields either.
        raise ClientError(400, f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ClientError(400, "The request body must be a JSON object.", code="invalid_json")
    # Every member has a colon of its own, and counting those costs next to nothing.
    if body.count(b":") > MAX_MEMBERS and splice.has_more_members(body, MAX_MEMBERS):
        raise ClientError(400, f"The request has more than {MAX_MEMBERS} members.", code="too_many_members")
    return _without_forbidden_fields(endpoint, body, fields)


def is_true(value: object) -> bool:
    """Tell whether vLLM's lenient request models (pydantic) would take this JSON value for true."""
    if isinstance(value, str):
        return value.lower() in _TRUE_TEXTS
    return isinstance(value, int | float) and value == 1


_TRUE_TEXTS: Final = frozenset({"1", "on", "t", "true", "y", "yes"})


def _without_forbidden_fields(endpoint: Endpoint, body: bytes, fields: dict[str, Any]) -> ApiRequest:
    if FORBIDDEN_FIELDS.isdisjoint(fields) and EXTRA_ARGUMENTS_FIELD not in fields:
        return ApiRequest(endpoint, body, fields, 0)
    start = splice.object_start(body)
    assert start is not None  # noqa: S101 - the body parsed to a dict
    removed = 0
    # One pass, however many there are: each edit of its own would copy the whole text.
    pieces: list[bytes] = []
    previous_end = 0
    for member in splice.members(body, start):
        if member.key == EXTRA_ARGUMENTS_FIELD and splice.is_object(body, member.value_start):
            value, count = _cleared(body[member.value_start : member.end], 0)
            pieces += (body[previous_end : member.value_start], value)
            previous_end = member.end
            removed += count
    pieces.append(body[previous_end:])
    cleared, count = _cleared(b"".join(pieces), start)
    removed += count
    if not removed:
        return ApiRequest(endpoint, body, fields, 0)
    is_given = isinstance(fields.get(TRANSFER_FIELD), dict)
    params = splice.raw_value(body, TRANSFER_FIELD) if is_given else None
    return ApiRequest(endpoint, cleared, orjson.loads(cleared), removed, params)


def _cleared(text: bytes, start: int) -> tuple[bytes, int]:
    """Return the text without forbidden members of the object at ``start``, and how many there were."""
    found = splice.members(text, start)
    count = sum(member.key in FORBIDDEN_FIELDS for member in found)
    return (splice.edit(text, start, found, drop=FORBIDDEN_FIELDS) if count else text), count


def has_non_text_content(fields: dict[str, Any]) -> bool:
    """Tell whether a chat holds images, audio or the like: their tokens do not identify their content."""
    return any(_is_non_text(message) for message in _items(fields.get("messages")))


def _is_non_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return any(isinstance(part, dict) and not _is_text_part(part) for part in _items(message.get("content")))


def _is_text_part(part: dict[str, Any]) -> bool:
    """Tell text from media as vLLM does: it reads a part with a ``uuid`` by its media key, whatever its type says.

    Source: vLLM 0.32 ``renderers/chat_utils.py``, ``has_non_text_content`` and ``_parse_chat_message_content_mm_part``.
    """
    kind = part.get("type")
    return isinstance(kind, str) and kind in _TEXT_PARTS and part.get("uuid") is None and _MEDIA_PARTS.isdisjoint(part)


_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_PARTS: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
