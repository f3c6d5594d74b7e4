"""Play the demo's chat through Envoy with the ``openai`` client and take its times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from openai import DefaultHttpxClient, OpenAI

from extproc import headers
from workers.demo.compare import ChosenToken
from workers.demo.conversation import QUESTIONS, next_messages
from workers.demo.receipts import receipt_value
from workers.supervision import StackError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONVERSATION_FIELD: Final = "session_id"
"""In the body and not in a header, because not every orchestrator forwards headers."""

CANDIDATES: Final = 5
"""Log-probabilities asked for per token. The first is the chosen token at temperature 0; a near tie is the
second."""

REQUEST_TIMEOUT_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One played turn. ``ttft_seconds`` ends with the first piece of text; the token counts are vLLM's."""

    question: str
    answer: str
    tokens: tuple[ChosenToken, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    ttft_seconds: float
    total_seconds: float
    receipt: str

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that the prefill worker read instead of computing, by the receipt."""
        return int(receipt_value(self.receipt, "reused") or 0)

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV the decode worker holds after this turn: all but the last generated one."""
        return self.prompt_tokens + self.completion_tokens - 1


def play(
    base_url: str,
    model: str,
    pasted: str,
    *,
    turns: int,
    name: str,
    max_tokens: int,
) -> Iterator[Turn]:
    """Play one conversation called ``name``, each answer going into the next turn's history.

    ``name`` is also the ``cache_salt``, so that neither run can find the other's blocks in a worker's prefix
    cache and only what kvloop carries over counts.
    """
    with (
        DefaultHttpxClient(trust_env=False) as http_client,
        OpenAI(
            base_url=f"{base_url}/v1",
            api_key="not-needed",
            max_retries=0,
            timeout=REQUEST_TIMEOUT_SECONDS,
            http_client=http_client,
        ) as client,
    ):
        client.models.list()  # so that no turn pays for opening the connection
        answers: list[str] = []
        for number in range(turns):
            messages = [message.as_json() for message in next_messages(pasted, answers)]
            turn = _play_turn(client, model, messages, question=QUESTIONS[number], name=name, max_tokens=max_tokens)
            answers.append(turn.answer)
            yield turn


def _play_turn(client: OpenAI, model: str, messages: list[Any], *, question: str, name: str, max_tokens: int) -> Turn:
    started = time.perf_counter()
    first_text: float | None = None
    text: list[str] = []
    tokens: list[ChosenToken] = []
    finish_reason = ""
    usage = None
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=CANDIDATES,
        # Token ids as strings: two tokens may be spelled alike, for example parts of one character.
        extra_body={CONVERSATION_FIELD: name, "cache_salt": name, "return_tokens_as_token_ids": True},
    )
    for chunk in response.parse():
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first_text = first_text or time.perf_counter()
                text.append(choice.delta.content)
            if choice.logprobs is not None:
                tokens += map(_chosen_token, choice.logprobs.content or ())
            finish_reason = choice.finish_reason or finish_reason
    ended = time.perf_counter()
    if usage is None:
        raise StackError(f"the answer to {question!r} ended without its usage: the stream was cut off")
    return Turn(
        question=question,
        answer="".join(text),
        tokens=tuple(tokens),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=finish_reason,
        ttft_seconds=(first_text or ended) - started,
        total_seconds=ended - started,
        receipt=response.headers.get(headers.RECEIPT, ""),
    )


def _chosen_token(entry: Any) -> ChosenToken:
    candidates = {candidate.token: candidate.logprob for candidate in entry.top_logprobs}
    return ChosenToken(entry.token, entry.logprob, {**candidates, entry.token: entry.logprob})
