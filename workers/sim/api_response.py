"""Answers out, in vLLM's exact bytes: field order, nulls, which chunk carries what. No spaces, UTF-8 unescaped.

Source: recordings of vLLM 0.32 (``tests/recordings``), and for 0.33 its ``chat_completion/serving.py``,
``completion/serving.py`` and the two ``protocol.py``: ``kv_transfer_params`` is set (null before the end) on every chunk
but the chat role chunk and the usage chunk, and finished choices carry ``weight_versions``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from workers.sim import text

if TYPE_CHECKING:
    from workers.sim.api_request import ApiCall
    from workers.sim.settings import WorkerSettings

DONE: Final = b"data: [DONE]\n\n"


@dataclass(slots=True, kw_only=True)
class Output:
    """What one choice added in one step, or in all (non-streamed)."""

    index: int
    text: str
    token_ids: list[int]
    confidences: list[float] = field(default_factory=list)
    """Log-probability of each token in ``token_ids``."""
    completion_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    handle: dict[str, Any] | None = None


class AnswerWriter:
    """Writes one call's answer. ``created`` is in Unix seconds."""

    def __init__(self, call: ApiCall, settings: WorkerSettings, created: int) -> None:
        self.call = call
        self.settings = settings
        self._is_chat = call.dialect == "chat"
        self._is_033 = settings.vllm_version.startswith("0.33")
        self._head = {
            "id": call.call_id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": created,
            "model": call.model,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"} if self._is_chat else self._head
        self._prompt_tokens = sum(map(len, call.prompts))
        self._told_prompt: set[int] = set()
        self._offsets: dict[int, int] = {}

    # --- streamed -------------------------------------------------------------------------------------------

    def role_chunks(self) -> list[bytes]:
        """Return the chunks that open a chat stream: one per choice."""
        ids = self.call.prompts[0] if self.call.return_token_ids else None
        chunks = []
        for index in range(self.call.choices_per_prompt):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
            if self.call.continuous_usage:
                chunk["usage"] = self._chunk_usage(0)
            chunks.append(_event({**chunk, "prompt_token_ids": ids, "prompt_text": None}))
        return chunks

    def chunk(self, output: Output) -> bytes:
        """Return the chunk of one step of one choice."""
        is_last = output.finish_reason is not None
        choice = self._chat_delta(output) if self._is_chat else self._completion_delta(output)
        if self._is_033 and (is_last or not self._is_chat):
            choice["weight_versions"] = None
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
        if self.call.continuous_usage:
            chunk["usage"] = self._chunk_usage(output.completion_tokens)
        if is_last and not self.call.include_usage:
            chunk["system_fingerprint"] = self.settings.fingerprint
        if self._is_033 or (output.handle is not None and self.settings.streams_handles):
            chunk["kv_transfer_params"] = output.handle
        return _event(chunk)

    def usage_chunk(self, completion_tokens: int) -> bytes:
        """Return the chunk that ends a stream with ``include_usage``."""
        usage = _usage(self._prompt_tokens, completion_tokens)
        return _event(
            {**self._chunk_head, "choices": [], "usage": usage, "system_fingerprint": self.settings.fingerprint}
        )

    def _chat_delta(self, output: Output) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": {"content": output.text},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = output.token_ids if self.call.return_token_ids else None
        return choice

    def _completion_delta(self, output: Output) -> dict[str, Any]:
        prompt_ids = None
        if self.call.return_token_ids and output.index not in self._told_prompt:
            prompt_ids = self._prompt_of(output.index)
            self._told_prompt.add(output.index)
        return {
            "index": output.index,
            "text": output.text,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": output.token_ids if self.call.return_token_ids else None,
        }

    def _chunk_usage(self, completion_tokens: int) -> dict[str, Any]:
        usage = _usage(self._prompt_tokens, completion_tokens)
        return {**usage, "completion_tokens_details": None} if self._is_chat else usage

    # --- whole ----------------------------------------------------------------------------------------------

    def whole(self, outputs: list[Output]) -> bytes:
        """Return the body of a non-streamed answer."""
        total = sum(len(output.token_ids) for output in outputs)
        details = {"prompt_tokens_details": None, "completion_tokens_details": None}
        answer: dict[str, Any] = {
            **self._head,
            "choices": [(self._chat_choice if self._is_chat else self._completion_choice)(o) for o in outputs],
            "service_tier": None,
            "system_fingerprint": self.settings.fingerprint,
            "usage": {**_usage(self._prompt_tokens, total), **details},
        }
        if self._is_chat:
            answer["prompt_logprobs"] = None
            answer["prompt_token_ids"] = self.call.prompts[0] if self.call.return_token_ids else None
            answer["prompt_text"] = None
        handle = outputs[-1].handle if self._is_chat else outputs[0].handle
        return orjson.dumps({**answer, "kv_transfer_params": handle, "ec_transfer_params": None, "metrics": None})

    def _chat_choice(self, output: Output) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": output.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self.call.return_token_ids else None,
            "routed_experts": None,
        }
        return {**choice, "weight_versions": None} if self._is_033 else choice

    def _completion_choice(self, output: Output) -> dict[str, Any]:
        choice = {
            "index": output.index,
            "text": (text.decode(self._prompt_of(output.index)) if self.call.echo else "") + output.text,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self.call.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_of(output.index) if self.call.return_token_ids else None,
            "routed_experts": None,
        }
        return {**choice, "weight_versions": None} if self._is_033 else choice

    # --- both -----------------------------------------------------------------------------------------------

    def _prompt_of(self, index: int) -> list[int]:
        return self.call.prompts[index // self.call.choices_per_prompt]

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        count = self.call.top_logprobs
        if count is None:
            return None
        tokens = list(zip(output.token_ids, output.confidences, strict=True))
        if self._is_chat:
            return {
                "content": [
                    {**entry, "top_logprobs": [_logprob(*other) for other in _likeliest(token, logprob, count)]}
                    for token, logprob in tokens
                    for entry in (_logprob(token, logprob),)
                ]
            }
        offset = self._offsets.get(output.index, 0)
        offsets = []
        for token, _ in tokens:
            offsets.append(offset)
            offset += len(text.token_string(token))
        self._offsets[output.index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [logprob for _, logprob in tokens],
            "tokens": [text.token_string(token) for token, _ in tokens],
            "top_logprobs": [
                {text.token_string(other): value for other, value in _likeliest(token, logprob, max(count, 1))}
                for token, logprob in tokens
            ],
        }


def _likeliest(token: int, logprob: float, count: int) -> list[tuple[int, float]]:
    """Invent the runners-up: the tokens after the chosen one, each half as likely."""
    return [((token + step) % text.VOCABULARY_SIZE, logprob - 0.7 * step) for step in range(count)]


def _logprob(token: int, logprob: float) -> dict[str, Any]:
    shown = text.token_string(token)
    return {"token": shown, "logprob": logprob, "bytes": list(shown.encode())}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
