"""From the engine's tokens to what the API tells: text with stop strings taken out, finish reasons, the handle."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from extproc.proof import fingerprint, prompt_end, prompt_end_to_json, to_json
from workers.sim import text
from workers.sim.api_request import parse_call
from workers.sim.api_response import Output
from workers.sim.engine import Engine, EngineDeadError, Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from workers.sim.api_request import ApiCall, Dialect
    from workers.sim.runner import EngineRunner
    from workers.sim.settings import WorkerSettings


class StopText:
    """Text as it grows, held back by what could still become a stop string, and cut where one begins."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held_back = max(map(len, stop), default=1) - 1
        self._text = ""
        self._shown = 0

    def push(self, piece: str, *, is_last: bool) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string if one was reached."""
        searched_from = max(0, len(self._text) - self._held_back)
        self._text += piece
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, searched_from)) >= 0]
        stop = None
        end = len(self._text) - (0 if is_last else self._held_back)
        if found:
            end, stop = min(found)
        shown, self._shown = self._text[self._shown : max(end, self._shown)], max(end, self._shown)
        return shown, stop


class TokenChooser:
    """Picks each token of a call, knows the last one, and remembers how sure it was (a log-probability)."""

    def __init__(self, call: ApiCall, model: text.Model) -> None:
        self._call = call
        self._model = model
        self.confidence = 0.0

    def __call__(self, attended: bytes, generated: int) -> tuple[int, bool]:
        """Return the next token id and whether it ends the answer."""
        call = self._call
        may_end = not call.ignore_eos and generated >= call.min_tokens
        token = self._model.next_token(attended, generated, may_end=may_end)
        self.confidence = -(int.from_bytes(attended[6:8], "little") + 1) / 32768
        return token, may_end and (token == text.IM_END or token in call.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of a call: the engine's request and who picks its tokens."""

    index: int
    request: Request
    chooser: TokenChooser


def choices_of(call: ApiCall, settings: WorkerSettings) -> list[Choice]:
    """Return the call's sequences. Each has its own copy of the transfer parameters."""
    choices = []
    for index, request_id in enumerate(call.request_ids):
        chooser = TokenChooser(call, settings.model)
        request = Request(
            request_id=request_id,
            prompt=call.prompts[index // call.choices_per_prompt],
            next_token=chooser,
            max_tokens=call.max_tokens,
            kv_transfer_params=dict(call.kv_transfer_params) if call.kv_transfer_params else None,
            cache_salt=call.cache_salt,
            model=call.model,
        )
        choices.append(Choice(index, request, chooser))
    return choices


async def outputs(
    call: ApiCall, choice: Choice, runner: EngineRunner, settings: WorkerSettings
) -> AsyncGenerator[Output, None]:
    """Run one choice and yield what each token adds to its answer."""
    request = choice.request
    stop_text = StopText(call.stop)
    async with aclosing(runner.generate(request)) as tokens:
        async for token in tokens:
            reason = request.finish_reason
            shown, stop = stop_text.push(text.decode((token,)), is_last=reason is not None)
            yield Output(
                index=choice.index,
                text=shown,
                token_ids=[token],
                confidences=[choice.chooser.confidence],
                completion_tokens=len(request.generated),
                finish_reason="stop" if stop else reason,
                stop_reason=stop or (token if reason == "stop" and token != text.IM_END else None),
                handle=told_handle(request, settings) if reason is not None else None,
            )
            if stop:
                return
    if request.finish_reason == "error":
        raise EngineDeadError


def right_answer(dialect: Dialect, fields: dict[str, Any], settings: WorkerSettings) -> str:
    """Return what a worker with right KV says to a request: the text of its first choice."""
    call = parse_call(dialect, dict(fields), settings, None)
    choice = choices_of(call, settings)[0]
    request = choice.request
    engine = Engine(
        replace(settings.engine, block_count=-(-settings.engine.max_model_len // settings.engine.block_size))
    )
    engine.submit(request)
    engine.admit(0.0)
    engine.prefill(request)
    stop_text = StopText(call.stop)
    said = ""
    stop: str | None = None
    while stop is None and request.finish_reason is None:
        token = engine.step(request, 0.0)
        shown, stop = stop_text.push(text.decode((token or 0,)), is_last=request.finish_reason is not None)
        said += shown
    return said


def told_handle(request: Request, settings: WorkerSettings) -> dict[str, Any] | None:
    """Return the handle as the API shows it, with the plugin's digest where that is on."""
    handle = request.handle
    if handle is None or not settings.digests_handles or request.is_prefill_leg:
        return handle
    tokens = [*request.prompt, *request.generated][: handle["remote_num_tokens"]]
    digest = {
        **to_json(fingerprint(tokens)),
        "prompt": prompt_end_to_json(prompt_end(request.prompt)),
        "block_size": settings.engine.block_size,
    }
    return {**handle, "kvloop_digest": digest}
