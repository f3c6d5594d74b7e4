"""What conversations do: go on, edit, fork, retry, leave, come back late, and share ids they should not share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from bench.soak.gateway import FORBIDDEN, Served
from workers.sim.answer import right_answer
from workers.sim.text import WORDS, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from random import Random

    import simpy

    from bench.soak.gateway import Replica

ACTS: Final = {
    "continue": 58,
    "edit": 8,
    "shorten": 6,
    "truncate": 5,
    "regenerate": 5,
    "retry": 6,
    "fork": 5,
    "leave": 7,
}
"""What a client does with its next turn, and how often, in percent."""

SHARES_ID, IS_ADAPTER, IS_CHAT = 0.1, 0.1, 0.75
"""Share of conversations that bear an id others bear too, that talk to a LoRA, that chat and do not complete."""

CHANGES_REPLICA, IS_STREAMED, SENDS_IDS, WANTS_USAGE, IS_ODD = 0.05, 0.85, 0.5, 0.2, 0.03
"""Share of turns: through another gateway, streamed, completions of token ids, with usage, with each oddity."""

MEAN_GAP_SECONDS: Final = 2.0
SHARED_IDS: Final = 8
TEXT_CHECKED: Final = 0.1
"""Share of whole answers whose text is compared with what right KV says: it costs as much as the turn."""

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@dataclass(slots=True)
class Judgement:
    """What clients saw that must not be."""

    texts_checked: int = 0
    texts_wrong: int = 0
    answers_garbled: int = 0
    secrets_leaked: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


class Conversation:
    """One client. ``history`` is its messages, or for completions one growing text."""

    def __init__(
        self,
        env: simpy.Environment,
        dice: Random,
        pick_replica: Callable[[], Replica],
        judgement: Judgement,
        number: int,
    ) -> None:
        self.env = env
        self.dice = dice
        self.judgement = judgement
        self.pick_replica = pick_replica
        self.replica = pick_replica()
        shares_id = dice.random() < SHARES_ID
        self.name = f"shared-{dice.randrange(SHARED_IDS)}" if shares_id else f"c-{number}"
        self.tenant = f"Bearer {dice.choice('abc')}"
        self.model = "sim:adapter" if dice.random() < IS_ADAPTER else "sim"
        self.is_chat = dice.random() < IS_CHAT
        self.history: list[dict[str, Any]] = [{"role": "system", "content": self._words(60)}]

    def turn(self, act: str) -> Generator[simpy.Event, Any, int]:
        """Do ``act`` and wait for what comes of it; returns how many requests that took."""
        if act != "regenerate":
            self._rewrite(act)
            self.history.append({"role": "user", "content": self._words(24)})
        elif self.history[-1]["role"] == "assistant" and len(self.history) > 1:
            self.history.pop()
        body = self._body(self.history)
        if act == "fork":
            other = self._body([*self.history[:-1], {"role": "user", "content": self._words(24)}])
            yield from self._both(body, other)
            return 2
        if act == "retry":
            yield from self._both(body, body)
            return 2
        leaves_after = self.dice.expovariate(1 / 0.15) if act == "leave" else None
        self._take_in((yield from self._send(body, leaves_after)))
        return 1

    def _both(self, first: dict[str, Any], second: dict[str, Any]) -> Generator[simpy.Event, Any, None]:
        one = self.env.process(self._send(first, None))
        yield self.env.timeout(self.dice.choice((0.0, 0.001, 0.01, 0.1)))
        two = self.env.process(self._send(second, None))
        yield one & two
        served: Served = one.value  # type: ignore[assignment] # simpy leaves it open
        self._take_in(served)

    def _send(self, body: dict[str, Any], leaves_after: float | None) -> Generator[simpy.Event, Any, Served]:
        if self.dice.random() < CHANGES_REPLICA:
            self.replica = self.pick_replica()
        headers = (("x-conversation-id", self.name), ("authorization", self.tenant))
        path = CHAT if "messages" in body else COMPLETIONS
        text = orjson.dumps(body)
        served: Served = yield from self.replica.serve(path, headers, text, leaves_after=leaves_after)
        self._judge(body, served)
        return served

    def _judge(self, body: dict[str, Any], served: Served) -> None:
        judgement = self.judgement
        judgement.statuses[served.status] = judgement.statuses.get(served.status, 0) + 1
        judgement.secrets_leaked += any(word in served.body for word in FORBIDDEN)
        if served.status != 200 or not served.is_whole:  # noqa: PLR2004 - HTTP OK
            return
        said = text_of(served.body)
        if said is None:
            judgement.answers_garbled += 1
        elif served.worker is not None and self.dice.random() < TEXT_CHECKED:
            judgement.texts_checked += 1
            clean = {key: value for key, value in body.items() if key != "kv_transfer_params"}
            dialect = "chat" if "messages" in body else "completions"
            right = right_answer(dialect, clean, served.worker.settings)  # type: ignore[arg-type]
            judgement.texts_wrong += said != right

    def _take_in(self, served: Served) -> None:
        """Continue from what was said; a turn without an answer is as if it had not been sent."""
        said = text_of(served.body) if served.is_whole and served.status == 200 else None  # noqa: PLR2004 - HTTP OK
        if said:
            self.history.append({"role": "assistant", "content": said})
        elif self.history[-1]["role"] == "user":
            self.history.pop()

    def _rewrite(self, act: str) -> None:
        dice, history = self.dice, self.history
        if act == "edit":
            message = dice.choice(history)
            at = dice.randrange(max(1, len(message["content"])))
            message["content"] = message["content"][:at] + dice.choice(WORDS) + message["content"][at:]
        elif act == "shorten":
            message = history[-1]
            message["content"] = message["content"][: len(message["content"]) // 2] or " baba"
        elif act == "truncate":
            del history[1 : 1 + dice.randrange(len(history))]

    def _words(self, mean: int) -> str:
        count = self.dice.randint(mean // 2, mean * 3 // 2)
        return "".join(self.dice.choices(WORDS, k=count))

    def _body(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        dice = self.dice
        body: dict[str, Any] = {
            "model": self.model,
            "stream": dice.random() < IS_STREAMED,
            "max_tokens": dice.randint(1, 16),
        }
        if self.is_chat:
            body["messages"] = [dict(message) for message in history]
        else:
            text = "".join(message["content"] for message in history)
            body["prompt"] = text if dice.random() < SENDS_IDS else encode(text)
        if body["stream"] and dice.random() < WANTS_USAGE:
            body["stream_options"] = {"include_usage": True}
        oddities: dict[str, Any] = {
            "ignore_eos": True,
            "return_token_ids": True,
            "stop": [dice.choice(WORDS)],
            "cache_salt": dice.choice("xy"),
            "kv_transfer_params": {"remote_host": "10.9.9.9", "do_remote_prefill": True},
        }
        return body | {name: value for name, value in oddities.items() if dice.random() < IS_ODD}


def text_of(body: bytes) -> str | None:
    """Return what the first choice says, streamed or not; ``None`` for a body that is no whole answer."""
    try:
        if not body.startswith(b"data: "):
            messages = [orjson.loads(body)]
        else:
            events = body.split(b"\n\n")
            if events[-2:] != [b"data: [DONE]", b""]:
                return None
            messages = [orjson.loads(event[6:]) for event in events[:-2]]
        return "".join(_said(choice) for message in messages for choice in message["choices"])
    except (ValueError, KeyError, TypeError):
        return None


def _said(choice: dict[str, Any]) -> str:
    holder = choice.get("delta") or choice.get("message")
    return str((choice.get("text") if holder is None else holder.get("content")) or "")
