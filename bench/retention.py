"""``kvloop bench retention``: what each way of retaining KV costs and saves, in simulated time.

The exchange, the proof, the store, the ledger and the policy are the real ones; the workers are the simulated engines with
their block pools, so wrong KV is counted and memory runs out as it would. Time is simulated: prefill 20,000 tokens/s, a read
up to 40 ms, 10 ms per generated token. So compare policies, not milliseconds with a GPU's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import simpy

from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.soak.client import text_of
from bench.soak.gateway import Envoy, Handles, Replica
from bench.soak.workers import Network, Worker
from bench.tables import table
from extproc import legs
from extproc.budget import BudgetRules, Entry, Ledger
from extproc.events import Call, Keep, Leg, Release, Take, header
from extproc.handle import COLD_PREFILL
from extproc.policy import returns_early
from extproc.settings import GatewaySettings
from extproc.store import ReturnedTurn
from extproc.worker_metrics import EngineLoad
from workers.sim.engine import EngineSettings
from workers.sim.settings import WorkerSettings
from workers.sim.text import Model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from extproc.events import Effect
    from extproc.identity import ConversationKey

BLOCK_SIZE: Final = 16
DECODE_BLOCKS: Final = 1600
PREFILL_BLOCKS: Final = 40_000
DOCUMENT_WORDS: Final = 220
LOOK_SECONDS: Final = 1.0
ARRIVALS_PER_SECOND: Final = 0.5
LOCAL_HIT_GOAL: Final = 1.1

POLICIES: Final = ("off", "lazy, no budget", "lazy", "eager", "adaptive", "local hit")
"""``local hit`` is the yardstick: reuse off, and P is fed each finished turn for nothing before the next one comes."""


@dataclass(frozen=True, slots=True)
class Load:
    """How clients behave. Gaps are log-normal; a conversation has one turn with chance ``one_turn``, else 2 to 6."""

    name: str
    median_gap_seconds: float
    question_words: int
    one_turn: float


LOADS: Final = (
    Load("quick, short", 4.0, 8, 0.2),
    Load("slow, short", 60.0, 8, 0.2),
    Load("quick, long", 4.0, 80, 0.2),
    Load("mostly one turn", 30.0, 8, 0.8),
)


@dataclass(slots=True)
class Seen:
    """What one run showed. Times in seconds, shares 0 to 1."""

    first_tokens: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    pinned: list[float] = field(default_factory=list)
    queued_for_retained: int = 0
    returns: int = 0
    returns_wasted: int = 0


class RetainingReplica(Replica):
    """A gateway that keeps a budget and returns turns early, as ``retention`` and ``returns`` do in real time."""

    def __init__(self, *args: Any, policy: str, seen: Seen) -> None:
        super().__init__(*args)
        self.policy = policy
        self.seen = seen
        share = 1.0 if policy == "lazy, no budget" else self.settings.retain_max_share
        pressure = 1.0 if policy == "lazy, no budget" else self.settings.retain_pressure
        self.has_budget = policy != "lazy, no budget"
        self.ledger = Ledger(BudgetRules(share, None, pressure, self.settings.min_reuse_tokens))
        self.returned: dict[ConversationKey, ReturnedTurn] = {}
        self._engines = {worker.engine.engine_id: worker for worker in self.decode}
        self.env.process(self._look_for_ever())

    def _perform(self, effect: Effect, envoy: Envoy) -> Generator[simpy.Event, Any, Any]:
        result = yield from super()._perform(effect, envoy)
        if isinstance(effect, Take):
            self.ledger.taken(effect.key, self.env.now)
            back = self.returned.pop(effect.key, None)
            return back if result is None else result
        if isinstance(effect, Keep):
            self._note_kept(effect)
        return result

    def _prefill_worker(self, call: Call) -> Worker | None:
        """Send the legs of a conversation to its own P, as Envoy does."""
        conversation = header(call.headers, "x-kvloop-conversation")
        if conversation is None:
            return super()._prefill_worker(call)
        return self.prefill[int(conversation[:8], 16) % len(self.prefill)]

    def _note_kept(self, keep: Keep) -> None:
        turn, now = keep.turn, self.env.now
        engine_id = turn.handle.engine_id
        tokens = max(turn.handle.tokens, max(turn.handle.blocks_per_group) * BLOCK_SIZE)
        self.ledger.kept(keep.key, Entry(engine_id, tokens, keep.kind, now, turn.deadline))
        self._trim(engine_id)
        if keep.returning is not None and returns_early(
            self.settings.return_mode,
            chance=self.ledger.chance(keep.key, now),
            d_under_pressure=self.ledger.under_pressure(engine_id),
        ):
            self.env.process(self._return(keep))

    def _return(self, keep: Keep) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(0)
        plan, found = keep.returning, self.store.take(keep.key)
        if plan is None or found is not keep.turn:
            if found is not None:
                self.store.restore(keep.key, found)
            return
        self.ledger.returned(keep.key)
        self.returned[keep.key] = ReturnedTurn(keep.turn.sequence, plan.tokens)
        self.seen.returns += 1
        headers = (("x-kvloop-conversation", str(keep.key)), ("x-request-id", f"return-{self.dice.getrandbits(64):x}"))
        yield from self._call(Call(Leg.RETURN, legs.RETURN_PATH, headers, plan.body, 30.0))

    def _trim(self, engine_id: str) -> None:
        if not self.has_budget:
            return
        for key in self.ledger.excess(engine_id, self.env.now):
            turn = self.store.take(key)
            self.ledger.dropped(key)
            if turn is not None:
                self._release(Release(turn.handle, turn.model, "over_budget"))

    def _look_for_ever(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self.env.timeout(LOOK_SECONDS)
            self.ledger.expire(self.env.now)
            for retained in self.ledger.engines():
                engine = self._engines[retained.engine_id].engine
                load = EngineLoad(
                    BLOCK_SIZE, engine.settings.block_count * BLOCK_SIZE, engine.pool.usage, len(engine.waiting)
                )
                self.ledger.observed(retained.engine_id, load)
                self._trim(retained.engine_id)


class Play:
    """One policy under one load."""

    def __init__(self, policy: str, load: Load, seed: int, *, decode_blocks: int = DECODE_BLOCKS) -> None:
        self.policy = policy
        self.load = load
        self.dice = random.Random(seed)
        self.env = simpy.Environment()
        self.seen = Seen()
        network = Network(self.env, random.Random(seed + 1), {})
        self.prefill = [Worker(_worker("prefill", PREFILL_BLOCKS), network, 5600 + number) for number in range(2)]
        self.decode = [Worker(_worker("decode", decode_blocks), network, 5700 + number) for number in range(2)]
        mode = policy if policy in {"eager", "adaptive"} else "lazy"
        settings = GatewaySettings(
            reuse=policy not in {"off", "local hit"},
            return_mode=mode,
            reuse_timeout_seconds=30.0,
        )
        self.replica = RetainingReplica(
            *(self.env, random.Random(seed + 2), settings, self.prefill, self.decode, Handles()),
            policy=policy,
            seen=self.seen,
        )

    def run(self, conversations: int) -> dict[str, Any]:
        """Play so many conversations to their end; returns the row of the result."""
        started = time.perf_counter()
        done = self.env.all_of([self.env.process(each) for each in self._arrivals(conversations)])
        self.env.process(self._sample())
        self.env.run(done)
        seen = self.seen
        seen.returns_wasted = seen.returns - seen.outcomes["local"]
        later = sorted(seen.first_tokens)
        engines = [worker.engine for worker in (*self.prefill, *self.decode)]
        return {
            "policy": self.policy,
            "load": self.load.name,
            "turns": sum(seen.statuses.values()),
            "later_turns": len(later),
            "ttft_ms": {"p50": _quantile(later, 0.5), "p99": _quantile(later, 0.99)},
            "pinned_share": {"mean": round(statistics.fmean(seen.pinned), 3), "max": round(max(seen.pinned), 3)},
            "requests_queued_for_retained_kv": seen.queued_for_retained,
            "refused": sum(count for status, count in seen.statuses.items() if status != 200),  # noqa: PLR2004
            "returns": seen.returns,
            "returns_wasted": seen.returns_wasted,
            "outcomes": dict(seen.outcomes),
            "wrong_kv_turns": sum(engine.counters.wrong_kv_turns for engine in engines),
            "handles_used_twice": sum(engine.counters.handles_used_twice for engine in engines),
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _arrivals(self, conversations: int) -> Generator[Generator[simpy.Event, Any, None], None, None]:
        at = 0.0
        for number in range(conversations):
            at += self.dice.expovariate(ARRIVALS_PER_SECOND)
            turns = 1 if self.dice.random() < self.load.one_turn else self.dice.randint(2, 6)
            gaps = [self.load.median_gap_seconds * self.dice.lognormvariate(0.0, 0.7) for _ in range(turns)]
            yield self._converse(number, at, gaps)

    def _converse(self, number: int, at: float, gaps: list[float]) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(at)
        messages: list[dict[str, str]] = []
        dice = random.Random(number)
        for turn, gap in enumerate(gaps):
            words = DOCUMENT_WORDS if not turn else self.load.question_words
            messages.append({"role": "user", "content": " ".join(f"w{dice.randrange(9999)}" for _ in range(words))})
            body = orjson.dumps({"model": "sim", "messages": messages, "stream": True, "max_tokens": 400})
            headers = (("x-conversation-id", f"c{number}"), ("content-type", "application/json"))
            served = yield from self.replica.serve("/v1/chat/completions", headers, body, leaves_after=None)
            self.seen.statuses[served.status] += 1
            receipt = served.receipt
            if turn and receipt.ttft_ms is not None:
                self.seen.first_tokens.append(receipt.ttft_ms)
                self.seen.outcomes[str(receipt.outcome)] += 1
            messages.append({"role": "assistant", "content": text_of(served.body) or ""})
            if self.policy == "local hit":
                yield from self._feed(messages, receipt.conversation)
            yield self.env.timeout(gap)

    def _feed(self, messages: list[dict[str, str]], conversation: str | None) -> Generator[simpy.Event, Any, None]:
        """Have the conversation's P compute the finished turn, so that the next one is a pure local hit."""
        home = self.prefill[int(str(conversation)[:8], 16) % len(self.prefill)]
        fields = {"model": "sim", "messages": messages, "add_generation_prompt": False, "max_tokens": 1}
        body = orjson.dumps({**fields, "kv_transfer_params": orjson.loads(COLD_PREFILL)})
        yield self.env.process(home.answer("chat", body, f"feed-{self.dice.getrandbits(64):x}"))

    def _sample(self) -> Generator[simpy.Event, Any, None]:
        """Look ten times a second: what is pinned, and whether anything waits that would run were nothing retained."""
        waited: set[int] = set()
        while True:
            yield self.env.timeout(0.1)
            for worker in self.decode:
                engine = worker.engine
                blocks = sum(len(kept.blocks) for kept in engine.retained.values())
                self.seen.pinned.append(blocks / engine.settings.block_count)
                if engine.waiting and blocks and id(engine.waiting[0]) not in waited:
                    waited.add(id(engine.waiting[0]))
                    needed = -(-len(engine.waiting[0].prompt) // BLOCK_SIZE)
                    self.seen.queued_for_retained += needed <= engine.pool.free_count + blocks


def _worker(role: Any, blocks: int) -> WorkerSettings:
    return WorkerSettings(
        role=role,
        engine=EngineSettings(block_count=blocks, block_size=BLOCK_SIZE, max_model_len=8192),
        model=Model(mean_answer_tokens=150),
        streams_handles=role == "decode",
        digests_handles=role == "decode",
    )


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


# --- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--conversations", type=int, default=50, help="per policy and load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed plays the same turns (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (PNG)")


def main(args: argparse.Namespace) -> int:
    """Play every policy under every load; returns 1 if anything happened that must not."""
    line = ProgressLine()
    rows = []
    for load in LOADS:
        for policy in POLICIES:
            line.tell(f"retention: {load.name}: {policy}")
            rows.append(Play(policy, load, args.seed).run(args.conversations))
    line.end()
    result: dict[str, Any] = {"goals": goals(rows), "rows": rows, "machine": machine()}
    print(as_text(result))
    if args.json is not None:
        write_json(args.json, result)
    if args.plot is not None:
        from bench.plots import plot_retention  # noqa: PLC0415 - matplotlib takes its time

        plot_retention(result, args.plot)
    return 0 if all(result["goals"].values()) else 1


def goals(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Tell which of the goals were met."""
    by = {(row["load"], row["policy"]): row for row in rows}
    loads = {row["load"] for row in rows}
    slowdowns = [
        by[load, "eager"]["ttft_ms"]["p50"] / by[load, "local hit"]["ttft_ms"]["p50"]
        for load in loads
        if by[load, "local hit"]["ttft_ms"]["p50"]
    ]
    budgeted = [row for row in rows if row["policy"] in {"lazy", "eager", "adaptive"}]
    return {
        f"eager at most {LOCAL_HIT_GOAL} times a local hit (p50)": max(slowdowns) <= LOCAL_HIT_GOAL,
        "with the budget nothing queued for retained KV": not any(
            row["requests_queued_for_retained_kv"] for row in budgeted
        ),
        "nothing refused": not any(row["refused"] for row in budgeted),
        "no wrong KV, no handle used twice": not any(row["wrong_kv_turns"] + row["handles_used_twice"] for row in rows),
    }


def as_text(result: dict[str, Any]) -> str:
    """Return the result for people."""
    head = ["load", "policy", "TTFT p50 ms", "p99", "pinned mean", "max", "queued", "refused", "returns", "wasted"]
    lines = [
        [
            *(row["load"], row["policy"], f"{row['ttft_ms']['p50']}", f"{row['ttft_ms']['p99']}"),
            *(f"{row['pinned_share']['mean']:.0%}", f"{row['pinned_share']['max']:.0%}"),
            *(str(row[name]) for name in ("requests_queued_for_retained_kv", "refused", "returns", "returns_wasted")),
        ]
        for row in result["rows"]
    ]
    met = [f"{'met' if is_met else 'MISSED'}: {goal}" for goal, is_met in result["goals"].items()]
    return "\n".join([table(head, lines), "", *met])
