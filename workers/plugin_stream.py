"""Put the handle on the finish chunk of streamed answers, as vLLM does from 0.33 on.

vLLM 0.33 gives every chunk of the main loop a ``kv_transfer_params`` field, last in the object: the handle on each
choice's finish chunk, ``null`` on the ones before (not on a chat's first chunk, which only carries the role, nor on
the usage chunk). This part adds the finish chunk's field, at the same place, and leaves every other byte as the older
vLLM wrote it, so no nulls.
"""

from __future__ import annotations

import functools
import inspect
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    StreamMethod = Callable[..., AsyncGenerator[str, None]]

KEY: Final = "kv_transfer_params"
PATCHED: Final = "_kvloop_stream_handle"


def install() -> str:
    """Wrap vLLM's two stream generators, unless this vLLM sends the field itself."""
    from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415 (vLLM is there only on a worker)
        ChatCompletionStreamResponse,
    )
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: PLC0415

    if KEY in ChatCompletionStreamResponse.model_fields:
        return "this vLLM streams kv_transfer_params itself"
    chat = wrapped(OpenAIServingChat.chat_completion_stream_generator)
    completion = wrapped(OpenAIServingCompletion.completion_stream_generator)
    OpenAIServingChat.chat_completion_stream_generator = chat
    OpenAIServingCompletion.completion_stream_generator = completion
    return "kv_transfer_params go on the finish chunk of chat and completions streams"


def wrapped(method: StreamMethod) -> StreamMethod:
    """Return ``method`` with the handle added to its finish chunks; raises ``TypeError`` if it is not the one we know."""
    if getattr(method, PATCHED, False):
        return method
    signature = inspect.signature(method)
    if not {"request", "result_generator"} <= signature.parameters.keys():
        raise TypeError(f"{method.__qualname__} takes {list(signature.parameters)}")

    @functools.wraps(method)
    async def with_handles(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        call = signature.bind(*args, **kwargs)
        handles: dict[int, dict[str, Any]] = {}
        choices = getattr(call.arguments["request"], "n", None) or 1
        tap = call.arguments["result_generator"] = _tap(call.arguments["result_generator"], choices, handles)
        async with aclosing(tap), aclosing(method(*call.args, **call.kwargs)) as events:
            async for event in events:
                yield add_handle(event, handles) if handles else event

    setattr(with_handles, PATCHED, True)
    return with_handles


async def _tap(
    results: AsyncIterator[Any], choices: int, handles: dict[int, dict[str, Any]]
) -> AsyncGenerator[Any, None]:
    """Pass results through, noting in ``handles`` the handle of every choice that finishes, by its index.

    A result is a ``RequestOutput`` (chat) or a pair of prompt index and one (completions, where a request may carry
    several prompts and the choices of prompt *p* are numbered from *p* times ``n``).
    """
    try:
        async for item in results:
            prompt, output = item if isinstance(item, tuple) else (0, item)
            if output.kv_transfer_params is not None:
                for choice in output.outputs:
                    if choice.finish_reason is not None:
                        handles[choice.index + prompt * choices] = output.kv_transfer_params
            yield item
    finally:
        if (close := getattr(results, "aclose", None)) is not None:
            await close()


def add_handle(event: str, handles: dict[int, dict[str, Any]]) -> str:
    """Return ``event`` with the handle of the choice that finishes in it, taken out of ``handles``; else unchanged."""
    start, end = event.find("{"), event.rfind("}")
    if not event.startswith("data: ") or start < 0 or end < start:
        return event
    try:
        chunk = json.loads(event[start : end + 1])
        finished = [choice["index"] for choice in chunk["choices"] if choice.get("finish_reason") is not None]
    except (ValueError, KeyError, TypeError, AttributeError):
        return event  # an error object, or the end marker
    for index in finished:
        if (handle := handles.pop(index, None)) is not None:
            field = json.dumps({KEY: handle}, separators=(",", ":"), ensure_ascii=False)[1:]
            return f"{event[:end]},{field}{event[end + 1 :]}"
    return event
