"""The bodies kvloop sends to workers: what each leg keeps, drops or changes of the client's request.

The decode leg is the client's own text plus what makes it a decode leg. The prefill leg computes the prompt's KV and one
throw-away token, so fields that shape *output* go, and fields that shape the *prompt* stay. Anything not in the table stays
untouched on both legs, known to kvloop or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from extproc import handle as handles
from extproc import splice
from extproc.endpoints import COMPLETIONS, Dialect
from extproc.receipt import Reason
from extproc.request import FORBIDDEN_FIELDS, ApiRequest, has_non_text_content, is_true

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.handle import Handle


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What happens to a field on the prefill leg: dropped, or set to a value (JSON text) when ``value`` is given."""

    why: str
    value: bytes | None = None


PREFILL_FIELDS: Final[Mapping[str, FieldRule]] = {
    "stream": FieldRule("the answer is one JSON object we read whole", b"false"),
    "stream_options": FieldRule("only allowed with stream"),
    "max_tokens": FieldRule("one token: the prompt's KV is all we want", b"1"),
    "max_completion_tokens": FieldRule("wins over max_tokens (vllm#21841)"),
    "min_tokens": FieldRule("may not exceed max_tokens"),
    "n": FieldRule("one sequence fills the cache; D makes the others"),
    "best_of": FieldRule("as n"),
    "use_beam_search": FieldRule("needs more than one token"),
    "stop": FieldRule("a stop string would end the leg as aborted, without KV for D"),
    "stop_token_ids": FieldRule("as stop"),
    "include_stop_str_in_output": FieldRule("only allowed with stop"),
    "logprobs": FieldRule("of a token nobody sees"),
    "top_logprobs": FieldRule("needs logprobs"),
    "logprob_token_ids": FieldRule("needs logprobs"),
    "prompt_logprobs": FieldRule("keeps P from using cached KV"),
    "structured_outputs": FieldRule("compiling a grammar for one thrown-away token"),
    "guided_json": FieldRule("as structured_outputs"),
    "guided_regex": FieldRule("as structured_outputs"),
    "guided_choice": FieldRule("as structured_outputs"),
    "guided_grammar": FieldRule("as structured_outputs"),
    "echo": FieldRule("P's text is thrown away"),
    "return_token_ids": FieldRule("its prompt ids are checked, and tokenised for D as well", b"true"),
}
"""The prefill leg, field by field. ``tools``, ``tool_choice``, ``chat_template_kwargs`` and the like shape the prompt;
so does ``response_format``, which some renderers (Kimi K3, Cohere) write into it.
"""


def plan_decode_alone(request: ApiRequest) -> Reason | None:
    """Return why this request must not be split into prefill and decode, None if it may be.

    One handle from P is read once, so it cannot serve several sequences; and D answers questions about the prompt's own
    log-probabilities only if it computes the prompt.
    """
    fields = request.fields
    # Anything but a plain 1: vLLM's lenient request models read "2" as 2, too.
    several = any(fields.get(name) not in (None, 1) for name in ("n", "best_of")) or is_true(
        fields.get("use_beam_search")
    )
    if several or _has_several_prompts(request):
        return Reason.SEVERAL_SEQUENCES
    if fields.get("prompt_logprobs") is not None or is_true(fields.get("echo")):
        return Reason.PROMPT_LOGPROBS
    return None


def is_text_only(request: ApiRequest) -> bool:
    """Tell whether token ids say everything about the prompt; if not, no proof is possible."""
    if request.endpoint.dialect is Dialect.CHAT:
        return not has_non_text_content(request.fields)
    return request.fields.get("prompt_embeds") is None and request.fields.get("prompt") is not None


def render_body(request: ApiRequest) -> bytes:
    """Body that asks P for the prompt's token ids; every field that shapes the prompt is in it."""
    return request.raw


def read_rendered(body: bytes) -> list[int] | None:
    """Read the render endpoints' answer; None unless it is one text-only prompt.

    Source: vLLM ``scale_out/render/api_router.py``: an object for chat, a list of them for completions.
    """
    try:
        rendered = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if isinstance(rendered, list) and len(rendered) == 1:
        rendered = rendered[0]
    if not isinstance(rendered, dict) or rendered.get("features") is not None:
        return None
    return _token_ids(rendered.get("token_ids"))


def prefill_body(request: ApiRequest, params: bytes, prompt_ids: bytes | None) -> bytes:
    """Body of the prefill leg. ``params``: transfer parameters; ``prompt_ids``: the rendered prompt (both JSON text)."""
    drop = {*PREFILL_FIELDS, *FORBIDDEN_FIELDS}
    add = {name: rule.value for name, rule in PREFILL_FIELDS.items() if rule.value is not None}
    return _leg_body(request, params, prompt_ids, drop, add)


def rewritten_prefill_body(
    request: ApiRequest, params: bytes, prompt_ids: bytes | None = None, *, cache_salt: str | None = None
) -> bytes:
    """Body of an orchestrator's prefill leg with other transfer parameters, and a question for the prompt's ids.

    Its own fields stay: it may have a use for what they make P answer.
    """
    drop = {*FORBIDDEN_FIELDS, "return_token_ids"}
    add = {"return_token_ids": b"true"}
    if cache_salt is not None:
        drop.add("cache_salt")
        add["cache_salt"] = orjson.dumps(cache_salt)
    return _leg_body(request, params, prompt_ids, drop, add)


def rewritten_body(request: ApiRequest, params: bytes) -> bytes:
    """Body of an orchestrator's leg with other transfer parameters, and nothing else changed."""
    return _leg_body(request, params, None, set(FORBIDDEN_FIELDS), {})


def decode_body(request: ApiRequest, params: bytes | None, prompt_ids: bytes | None, *, ask_token_ids: bool) -> bytes:
    """Body of the decode leg: the client's request plus transfer parameters (None: a plain request)."""
    if params is None:
        return request.raw
    if is_true(request.fields.get("return_prompt_text")):
        # D has that text only if it renders the prompt itself.
        prompt_ids = None
    drop = set(FORBIDDEN_FIELDS)
    add: dict[str, bytes] = {}
    if ask_token_ids:
        drop.add("return_token_ids")
        add["return_token_ids"] = b"true"
    return _leg_body(request, params, prompt_ids, drop, add)


def _leg_body(
    request: ApiRequest, params: bytes, prompt_ids: bytes | None, drop: set[str], add: dict[str, bytes]
) -> bytes:
    if prompt_ids is not None:
        if request.endpoint.dialect is Dialect.CHAT:
            params = handles.with_prompt_ids(params, prompt_ids)
        else:
            # vLLM reads forwarded ids only for chats; a completion takes them as its prompt. A suffix (fill in the
            # middle) is among the ids already, and vLLM refuses one beside them.
            drop |= {"prompt", "suffix"}
            add["prompt"] = prompt_ids
    add["kv_transfer_params"] = params
    start = splice.object_start(request.raw)
    assert start is not None  # noqa: S101 - parsed to a dict in request.py
    return splice.edit(request.raw, start, splice.members(request.raw, start), drop=drop, add=add)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer: transfer parameters for D (JSON text), the prompt's ids, and how many tokens P did not compute."""

    params: bytes
    prompt_ids: list[int] | None
    cached_tokens: int | None


def read_prefilled(body: bytes) -> Prefilled | None:
    """Read the prefill leg's answer; None when it carries nothing a D could read."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(answer, dict) or not handles.is_for_decode(answer.get("kv_transfer_params")):
        return None
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    ids = answer.get("prompt_token_ids")
    return Prefilled(
        params=splice.raw_value(body, "kv_transfer_params"),
        prompt_ids=_token_ids(first.get("prompt_token_ids") if ids is None else ids),
        cached_tokens=handles.cached_tokens(answer["kv_transfer_params"]),
    )


RELEASE_PATH: Final = COMPLETIONS.path
RETURN_PATH: Final = COMPLETIONS.path


def release_body(handle: Handle, model: str) -> bytes:
    """Body of a release: a one-token prompt whose transfer parameters claim no tokens, so P only frees D's blocks."""
    fields: dict[str, object] = {"prompt": [0], "max_tokens": 1, "stream": False}
    if model:
        fields["model"] = model
    text = orjson.dumps(fields)
    found = splice.members(text, 0)
    return splice.edit(text, 0, found, add={"kv_transfer_params": handles.release_params(handle)})


def return_body(
    prompt_ids: Sequence[int], params: bytes, *, model: str, cache_salt: str, priority: int | None
) -> bytes:
    """Body of a return: the finished turn as a prompt, with its own handle. ``params``: transfer parameters (JSON text)."""
    fields: dict[str, object] = {"prompt": prompt_ids, "max_tokens": 1, "stream": False}
    # Whatever keys P's prefix cache besides the tokens must be as in the conversation's turns.
    if model:
        fields["model"] = model
    if cache_salt:
        fields["cache_salt"] = cache_salt
    if priority is not None:
        fields["priority"] = priority
    text = orjson.dumps(fields)
    return splice.edit(text, 0, splice.members(text, 0), add={"kv_transfer_params": params})


def _has_several_prompts(request: ApiRequest) -> bool:
    prompt, embeds = request.fields.get("prompt"), request.fields.get("prompt_embeds")
    if embeds is not None and (prompt is not None or isinstance(embeds, list)):
        # vLLM answers them all, the embedded ones first.
        return True
    return isinstance(prompt, list) and len(prompt) > 1 and not all(type(token) is int for token in prompt)


def _token_ids(value: object) -> list[int] | None:
    if not isinstance(value, list) or not value:
        return None
    # Three passes in C: a prompt may have a hundred thousand ids. A bool is no id.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**32:
        return None
    return value
