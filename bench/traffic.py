"""The load generator, a process of its own: ``python -m bench.traffic CONFIG`` sends what a profile or trace says.

Open loop: a turn goes out when it is due, not when the machine finds it convenient; how late it really went is reported,
and times to first token count from when it was *due*. Each client keeps its history and sends it all with every turn.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import orjson
import uvloop

from bench.http_stream import Answer, Connections, post
from bench.processes import Usage, usage_of
from bench.profile import Conversation, Turn, parse_profile, read_trace
from bench.statistics import percentiles
from extproc.receipt import Outcome
from workers.sim.text import WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH: Final = "/v1/chat/completions"
SECOND: Final = 1.0
OK: Final = 200
COLD_PREFILL: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
LEGS: Final = ("render_ms", "prefill_ms")
STAGGER_SECONDS: Final = 1.0
"""Places of a closed loop start within this time, not all at once."""

DRAIN_SECONDS: Final = 60.0
"""After the last start, running answers may take this long; what is left counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """What to send, where to, for how long. ``prefill`` given: the generator itself does both legs (the baseline)."""

    host: str
    port: int
    seconds: float
    seed: int
    profile: dict[str, Any] | None = None
    trace: str | None = None
    """Path of a trace."""
    prefill_port: int | None = None
    watched: dict[str, list[int]] = field(default_factory=dict)
    """Processes whose CPU time is measured: name to process ids."""
    result: str = ""
    """Where to write the result."""
    max_turns: int | None = None


@dataclass(slots=True)
class Tally:
    """What happened, as raw numbers. Times in seconds."""

    turns: int = 0
    failed: int = 0
    chunks: int = 0
    first_token: array[float] = field(default_factory=lambda: array("d"))
    first_token_cold: array[float] = field(default_factory=lambda: array("d"))
    between_chunks: array[float] = field(default_factory=lambda: array("d"))
    whole_answer: array[float] = field(default_factory=lambda: array("d"))
    lateness: array[float] = field(default_factory=lambda: array("d"))
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    legs: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in LEGS})
    """What receipts say of our own calls to P, in seconds."""
    later_turns: int = 0
    """Turns that had a predecessor, so that something might have been reused."""

    def note(self, answer: Answer, due_at: float, *, is_later: bool) -> None:
        """Count one answer."""
        self.turns += 1
        self.later_turns += is_later
        self.statuses[answer.status] += 1
        self.lateness.append(answer.sent_at - due_at)
        if answer.status != OK or answer.broken or answer.first_event_at is None:
            self.failed += 1
            return
        receipt = _receipt(answer)
        outcome = receipt.get("outcome", "none")
        self.outcomes[outcome] += 1
        if "reason" in receipt:
            self.reasons[receipt["reason"]] += 1
        for name in ("reused", "prompt", "held"):
            self.tokens[name] += int(receipt.get(name, 0))
        for name, times in self.legs.items():
            if name in receipt:
                times.append(float(receipt[name]) / 1000)
        first = answer.first_event_at - due_at
        self.first_token.append(first)
        if outcome not in {Outcome.REUSED, Outcome.PARTIAL}:
            self.first_token_cold.append(first)
        self.whole_answer.append(answer.ended_at - due_at)
        last = None
        for at, events in answer.event_times:
            self.chunks += events
            if last is not None:
                self.between_chunks.append(at - last)
            self.between_chunks.extend(itertools.repeat(0.0, events - 1))
            last = at


class Traffic:
    """One run of the generator."""

    def __init__(self, config: TrafficConfig) -> None:
        self.config = config
        self.tally = Tally()
        self.in_flight = 0
        self.rates: list[int] = []
        self._decode = Connections(config.host, config.port)
        self._prefill = None if config.prefill_port is None else Connections(config.host, config.prefill_port)
        self._trace = read_trace(Path(config.trace).read_bytes().splitlines()) if config.trace else []
        self._words = Random(config.seed)
        self._started = 0.0
        self._stops_at = float("inf")

    async def run(self) -> dict[str, Any]:
        """Send everything, wait for the answers, and return what was measured."""
        before, own_before = self._usage(), _own_seconds()
        self._started = time.perf_counter()
        self._stops_at = self._started + self.config.seconds
        watcher = asyncio.create_task(self._watch())
        await self._send_all()
        seconds = time.perf_counter() - self._started
        watcher.cancel()
        after, own_seconds = self._usage(), _own_seconds() - own_before
        self._decode.close()
        return self._result(seconds, before, after, own_seconds)

    # --- who sends when ---------------------------------------------------------------------------------------------

    async def _send_all(self) -> None:
        config = self.config
        if config.trace is not None:
            await self._open_loop(iter(self._trace))
            return
        profile = parse_profile(orjson.dumps(config.profile), "of the run")
        conversations = profile.conversations(config.seed)
        if profile.concurrency is None:
            await self._open_loop(conversations)
        else:
            places = range(profile.concurrency)
            await asyncio.gather(
                *(self._closed_loop(conversations, STAGGER_SECONDS * place / len(places)) for place in places)
            )

    async def _open_loop(self, conversations: Iterator[Conversation]) -> None:
        running: set[asyncio.Task[None]] = set()
        for conversation in conversations:
            starts_at = self._started + (conversation.starts_at or 0.0)
            if starts_at >= self._stops_at or self._is_enough():
                break
            await _sleep_until(starts_at)
            task = asyncio.create_task(self._converse(conversation, starts_at))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running, timeout=self.config.seconds + DRAIN_SECONDS)

    async def _closed_loop(self, conversations: Iterator[Conversation], after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        while time.perf_counter() < self._stops_at and not self._is_enough():
            await self._converse(next(conversations), time.perf_counter())

    async def _converse(self, conversation: Conversation, starts_at: float) -> None:
        messages: list[dict[str, str]] = []
        due_at = starts_at
        for number, turn in enumerate(conversation.turns):
            due_at = self._due(turn, due_at)
            if due_at >= self._stops_at or self._is_enough():
                return
            await _sleep_until(due_at)
            text = "".join(self._words.choices(WORDS, k=turn.prompt_tokens))
            messages.append({"role": "user", "content": text})
            self.in_flight += 1
            answer = await self._ask(conversation.name, messages, turn)
            self.in_flight -= 1
            self.tally.note(answer, due_at, is_later=number > 0)
            if answer.status != OK or answer.broken:
                return
            messages.append({"role": "assistant", "content": said(answer.body())})
            due_at = answer.ended_at

    def _due(self, turn: Turn, free_at: float) -> float:
        if turn.at_seconds is None:
            return free_at + turn.gap_seconds
        return max(self._started + turn.at_seconds, free_at)

    def _is_enough(self) -> bool:
        limit = self.config.max_turns
        return limit is not None and self.tally.turns + self.in_flight >= limit

    # --- one turn ---------------------------------------------------------------------------------------------------

    async def _ask(self, name: str, messages: list[dict[str, str]], turn: Turn) -> Answer:
        config = self.config
        fields = {
            "model": "sim",
            "messages": messages,
            "stream": True,
            "max_tokens": turn.answer_tokens,
            "ignore_eos": True,
        }
        body = orjson.dumps(fields)
        headers = {"x-conversation-id": f"bench-{name}"}
        if self._prefill is None:
            return await self._decode.send(post(config.host, PATH, body, headers))
        # What any P/D router must do at least: prefill with one token, then decode with what P answered.
        prefill = fields | {"stream": False, "max_tokens": 1, "kv_transfer_params": orjson.Fragment(COLD_PREFILL)}
        first = await self._prefill.send(post(config.host, PATH, orjson.dumps(prefill), headers))
        if first.status != OK or first.broken:
            return first
        params = orjson.loads(first.body())["kv_transfer_params"]
        body = orjson.dumps(fields | {"kv_transfer_params": params})
        answer = await self._decode.send(post(config.host, PATH, body, headers))
        answer.sent_at = first.sent_at
        return answer

    # --- measuring --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Once a second: note the rate, tell how it goes."""
        seen = 0
        for second in itertools.count(1):
            await _sleep_until(self._started + second * SECOND)
            now, seen = self._decode.events - seen, self._decode.events
            self.rates.append(now)
            told = {
                "second": second,
                "turns": self.tally.turns,
                "failed": self.tally.failed,
                "in_flight": self.in_flight,
                "chunks_per_second": now,
                "ttft_ms": percentiles(self.tally.first_token[-200:], scale=1000),
            }
            print(orjson.dumps(told).decode(), flush=True)

    def _usage(self) -> dict[str, Usage]:
        return {name: usage_of(pids) for name, pids in self.config.watched.items()}

    def _result(
        self, seconds: float, before: dict[str, Usage], after: dict[str, Usage], own_seconds: float
    ) -> dict[str, Any]:
        tally = self.tally
        steady = sorted(self.rates[1 : int(self.config.seconds)] or self.rates) or [round(tally.chunks / seconds)]
        return {
            "seconds": seconds,
            "turns": tally.turns,
            "later_turns": tally.later_turns,
            "failed": tally.failed,
            "statuses": {str(status): count for status, count in tally.statuses.items()},
            "chunks": tally.chunks,
            "requests_per_second": tally.turns / seconds,
            "chunks_per_second": steady[len(steady) // 2],
            "ttft_ms": percentiles(tally.first_token, scale=1000),
            "ttft_cold_ms": percentiles(tally.first_token_cold, scale=1000),
            "between_chunks_ms": percentiles(tally.between_chunks, scale=1000),
            "answer_ms": percentiles(tally.whole_answer, scale=1000),
            **{name: percentiles(times, scale=1000) for name, times in tally.legs.items()},
            "late_ms": percentiles(tally.lateness, scale=1000),
            "outcomes": dict(tally.outcomes),
            "reasons": dict(tally.reasons),
            "tokens": dict(tally.tokens),
            "cpu_seconds": {name: after[name].cpu_seconds - before[name].cpu_seconds for name in before},
            "rss_mib": {name: after[name].rss_mib for name in after},
            "generator_cpu_seconds": own_seconds,
            "first_token_seconds": list(tally.first_token),
            "rates": self.rates,
        }


def said(body: bytes) -> str:
    """Return the text of a streamed chat answer."""
    events = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for event in events for choice in orjson.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _receipt(answer: Answer) -> dict[str, str]:
    value = (answer.header(b"x-kvloop-receipt") or b"").decode()
    return {key: text for key, _, text in (item.partition("=") for item in value.split(", ") if item)}


async def _sleep_until(at: float) -> None:
    delay = at - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(path: str) -> None:
    """Run by the config in that file; write the result where the config says."""
    config = TrafficConfig(**orjson.loads(Path(path).read_bytes()))
    result = uvloop.run(Traffic(config).run())
    Path(config.result).write_bytes(orjson.dumps(result))


def config_json(config: TrafficConfig) -> bytes:
    """Return a config as ``main`` reads it."""
    return orjson.dumps(asdict(config))


if __name__ == "__main__":
    main(sys.argv[1])
