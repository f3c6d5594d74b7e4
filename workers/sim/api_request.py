"""Requests in: what vLLM's chat and completions endpoints make of a JSON body, as far as kvloop can tell.

Source: vLLM 0.32 ``entrypoints/openai/{chat_completion,completion}/protocol.py``, ``renderers/online_renderer.py``. Error
texts are vLLM's own where a recording shows them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from workers.sim import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.sim.settings import WorkerSettings

Fields = dict[str, Any]
Dialect = Literal["chat", "completions"]


class ApiError(Exception):
    """The request is answered with this status and vLLM's error JSON."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": kind, "param": param, "code": status}
        self.body = orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One request, understood. Lengths in tokens."""

    dialect: Dialect
    call_id: str
    """``chatcmpl-…`` or ``cmpl-…``."""
    model: str
    prompts: tuple[list[int], ...]
    tokenised: bool
    """Whether the worker had to tokenise (and not just take token ids)."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    choices_per_prompt: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    top_logprobs: int | None
    """``None``: no log-probabilities asked for."""
    echo: bool
    cache_salt: str
    kv_transfer_params: Fields | None

    @property
    def request_ids(self) -> list[str]:
        """The engine's id of each sequence, as vLLM builds them; choices of one prompt next to each other."""
        ids = [
            f"{self.call_id}-{i}" if self.dialect == "completions" else self.call_id for i in range(len(self.prompts))
        ]
        if self.choices_per_prompt > 1:
            ids = [f"{choice}_{request_id}" for request_id in ids for choice in range(self.choices_per_prompt)]
        return [f"{request_id}-{secrets.token_hex(4)}" for request_id in ids]


def parse_body(body: bytes) -> Fields:
    """Return the body's JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": "body", "msg": "JSON decode error", "input": {}}
        raise ApiError(400, "Bad Request", f"1 validation error:\n  {detail}", "body") from error
    if not isinstance(fields, dict):
        raise _invalid("body", "Input should be a valid dictionary", fields, "dict_type")
    return fields


def parse_call(dialect: Dialect, fields: Fields, settings: WorkerSettings, request_id: str | None) -> ApiCall:
    """Understand a request and tokenise its prompt; raises ``ApiError``. ``request_id`` is the ``x-request-id`` header."""
    check_model(fields, settings)
    if fields.get("stream_options") and not fields.get("stream"):
        raise _invalid("stream_options", "Value error, Stream options can only be defined when `stream=True`.", None)
    prompts, tokenised = (_chat_prompt if dialect == "chat" else _completion_prompts)(fields, settings)
    limit = settings.engine.max_model_len
    longest = max(map(len, prompts))
    if longest >= limit:
        raise _too_long(limit, longest)
    chosen = fields.get("max_completion_tokens") if dialect == "chat" else None
    wanted = chosen if chosen is not None else fields.get("max_tokens", None if dialect == "chat" else 16)
    options = fields.get("stream_options") or {}
    base_id = request_id or fields.get("request_id") or secrets.token_hex(8)
    return ApiCall(
        dialect=dialect,
        call_id=("chatcmpl-" if dialect == "chat" else "cmpl-") + base_id,
        model=fields.get("model") or settings.model_name,
        prompts=tuple(prompts),
        tokenised=tokenised,
        max_tokens=max(1, limit - longest if wanted is None else min(wanted, limit - longest)),
        min_tokens=fields.get("min_tokens") or 0,
        ignore_eos=bool(fields.get("ignore_eos")),
        choices_per_prompt=fields.get("n") or 1,
        stop=_stop_strings(fields.get("stop")),
        stop_token_ids=frozenset(fields.get("stop_token_ids") or ()),
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=bool(fields.get("return_token_ids")),
        top_logprobs=_top_logprobs(dialect, fields),
        echo=bool(fields.get("echo")),
        cache_salt=fields.get("cache_salt") or "",
        kv_transfer_params=fields.get("kv_transfer_params") or None,
    )


def check_model(fields: Fields, settings: WorkerSettings) -> None:
    """Raise vLLM's 404 for a model (or LoRA) nobody serves here; ``name:adapter`` stands for a LoRA of the model."""
    model = fields.get("model")
    if model and model.partition(":")[0] != settings.model_name:
        message = f"The model `{model}` does not exist. Valid aliases: {settings.model_name}."
        raise ApiError(404, "NotFoundError", message, "model")


def render_messages(fields: Fields, settings: WorkerSettings) -> list[int]:
    """Return a chat's prompt, tokenised."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise _invalid("messages", "Input should be a valid list", messages, "list_type")
    if any(not isinstance(message, dict) or not isinstance(message.get("role"), str) for message in messages):
        raise _invalid("messages", "Field required", messages, "missing")
    prompt = text.render_chat(
        messages,
        tools=fields.get("tools"),
        add_generation_prompt=fields.get("add_generation_prompt", True),
        continue_final_message=fields.get("continue_final_message", False),
        drops_thoughts=settings.model.thinks,
        enable_thinking=(fields.get("chat_template_kwargs") or {}).get("enable_thinking", True),
    )
    return text.encode(prompt)


def _chat_prompt(fields: Fields, settings: WorkerSettings) -> tuple[list[list[int]], bool]:
    params = fields.get("kv_transfer_params")
    ids = params.pop("prompt_token_ids", None) if isinstance(params, dict) else None
    if ids is None or fields.get("echo") or _has_media(fields.get("messages")):
        return [render_messages(fields, settings)], True
    if not ids or not _are_ids(ids):
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise ApiError(400, "BadRequestError", message, "kv_transfer_params.prompt_token_ids")
    return [_known(ids)], False


def _completion_prompts(fields: Fields, _: WorkerSettings) -> tuple[list[list[int]], bool]:
    prompt = fields.get("prompt")
    if not prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise ApiError(400, "BadRequestError", message, "prompt")
    if isinstance(prompt, str):
        return [text.encode(prompt)], True
    if _are_ids(prompt):
        return [_known(prompt)], False
    if all(isinstance(item, str) for item in prompt):
        return [text.encode(item) for item in prompt], True
    if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
        return [_known(item) for item in prompt], False
    raise _invalid("prompt", "Input should be a valid string", prompt, "string_type")


def _known(ids: Sequence[int]) -> list[int]:
    if max(ids) >= text.VOCABULARY_SIZE:
        raise ApiError(400, "BadRequestError", f"Token id {max(ids)} is out of vocabulary", "prompt")
    return list(ids)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _has_media(messages: object) -> bool:
    parts = [
        part
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return any(part.get("type") != "text" for part in parts)


def _stop_strings(stop: object) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()


def _top_logprobs(dialect: Dialect, fields: Fields) -> int | None:
    if dialect == "completions":
        return fields.get("logprobs")
    return (fields.get("top_logprobs") or 0) if fields.get("logprobs") else None


def _too_long(limit: int, length: int) -> ApiError:
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens,"
        " which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        f" (parameter=input_tokens, value={length})"
    )
    return ApiError(400, "BadRequestError", message, "input_tokens")


def _invalid(field: str, message: str, value: object, kind: str = "value_error") -> ApiError:
    detail = {"type": kind, "loc": f"body.{field}", "msg": message, "input": value}
    return ApiError(400, "Bad Request", f"1 validation error:\n  {detail}", f"body.{field}")
