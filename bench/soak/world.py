"""Puts the soak's parts together, lets faults strike, waits for the dust to settle, and judges."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import simpy

from bench.soak.client import ACTS, MEAN_GAP_SECONDS, Conversation, Judgement
from bench.soak.gateway import Handles, Replica
from bench.soak.workers import Network, Worker
from extproc.settings import GatewaySettings
from workers.sim.engine import EngineSettings
from workers.sim.settings import WorkerSettings
from workers.sim.text import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from workers.sim.settings import Role

BLOCK_SIZE: Final = 16
BLOCKS: Final = 224
"""Tiny on purpose: a worker's pool holds some ten of the conversations that want it, so blocks change hands quickly."""

MAX_MODEL_LEN: Final = 1024
TTL_SECONDS: Final = 30.0
LEASE_SECONDS: Final = 10.0
CLIENTS: Final = 24
LATE: Final = 0.04
"""Share of turns that come about when the handle expires."""

TURNS_PER_CONVERSATION: Final = 5
FAULTS: Final = {"restart decode": 1 / 400, "restart prefill": 1 / 1000, "crash gateway": 1 / 1500, "drain": 1 / 1500}
"""Chance of each per turn."""

MUST_BE_ZERO: Final = (
    "wrong_kv_turns",
    "poisoned_blocks_cached",
    "handles_used_twice",
    "handles_sent_twice",
    "pins_left",
    "leases_left",
    "blocks_lost",
    "turns_kept_at_the_end",
    "texts_wrong",
    "answers_garbled",
    "secrets_leaked",
    "engines_dead",
)


@dataclass(slots=True)
class Result:
    """What a soak found. Everything in ``MUST_BE_ZERO`` is a violation; the rest says what was played."""

    seed: int
    turns: int = 0
    seconds: float = 0.0
    turns_per_second: float = 0.0
    simulated_seconds: float = 0.0
    violations: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    acts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    texts_checked: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing happened that must not."""
        return not any(self.violations.values())

    def as_json(self) -> dict[str, Any]:
        """Return the result for ``--json``: the violations stand at the top."""
        fields = asdict(self)
        return {"is_clean": self.is_clean, **fields.pop("violations"), **fields}


def soak(
    turns: int, seed: int, *, progress: Callable[[int, int], None] = lambda _done, _wrong: None, every: int = 1000
) -> Result:
    """Play ``turns`` requests (a few more: forks and retries count double) and return what was seen.

    ``progress`` is called every ``every`` turns with the turns so far and those among them that attended to wrong KV.
    """
    started = time.perf_counter()
    world = World(seed)
    world.play(turns, progress, every)
    return world.judge(time.perf_counter() - started)


class World:
    """All parts, for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.env = simpy.Environment()
        self.handles = Handles()
        self.judgement = Judgement()
        self.acts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.turns = 0
        self._conversations = 0
        network = Network(self.env, self.dice, {})
        self.prefill = [Worker(self._worker("prefill", number), network, 5600 + number) for number in range(2)]
        self.decode = [Worker(self._worker("decode", number), network, 5700 + number) for number in range(3)]
        settings = GatewaySettings(
            handle_ttl_seconds=TTL_SECONDS,
            handle_margin_seconds=8.0,
            min_reuse_tokens=32,
            store_max_conversations=20,
            reuse_timeout_seconds=5.0,
            prefill_timeout_seconds=20.0,
        )
        self.replicas = [
            Replica(self.env, self.dice, settings, self.prefill, self.decode, self.handles) for _ in range(2)
        ]

    def play(self, turns: int, progress: Callable[[int, int], None], every: int) -> None:
        """Run until so many turns were sent, then let everything end and expire."""
        clients = [self.env.process(self._client(turns)) for _ in range(CLIENTS)]
        self.env.process(self._report(progress, every, turns))
        self.env.run(self.env.all_of(clients))
        self.env.run(self.env.now + 2 * TTL_SECONDS + LEASE_SECONDS)

    def judge(self, seconds: float) -> Result:
        """Count what must not be, and what was."""
        engines = [worker.engine for worker in (*self.prefill, *self.decode)]
        for engine in engines:
            engine.expire(self.env.now)
        totals: Counter[str] = Counter()
        for engine in engines:
            totals.update(asdict(engine.counters))
        judgement = self.judgement
        violations = {
            **{name: totals[name] for name in MUST_BE_ZERO if name in totals},
            "handles_sent_twice": self.handles.sent_twice,
            "pins_left": sum(len(engine.retained) for engine in engines),
            "leases_left": sum(len(engine.leased) for engine in engines),
            # Stock vLLM never gives back the blocks of a request it parked (workers/plugin_repair.py); those are not ours.
            "blocks_lost": sum(
                worker.engine.settings.block_count - worker.engine.pool.free_count
                for worker in (*self.prefill, *self.decode)
                if not worker.leaked_blocks
            ),
            "turns_kept_at_the_end": sum(len(replica.store) for replica in self.replicas),
            "texts_wrong": judgement.texts_wrong,
            "answers_garbled": judgement.answers_garbled,
            "secrets_leaked": judgement.secrets_leaked,
            "engines_dead": sum(engine.dead for engine in engines),
        }
        return Result(
            seed=self.seed,
            turns=self.turns,
            seconds=round(seconds, 2),
            turns_per_second=round(self.turns / seconds, 1),
            simulated_seconds=round(self.env.now, 1),
            violations={name: violations[name] for name in MUST_BE_ZERO},
            outcomes=_sum(replica.turns for replica in self.replicas),
            reasons=_sum(replica.reasons for replica in self.replicas),
            releases=_sum(replica.released for replica in self.replicas),
            acts=dict(sorted(self.acts.items())),
            faults=dict(sorted(self.faults.items())),
            statuses={str(status): count for status, count in sorted(judgement.statuses.items())},
            engines={name: count for name, count in sorted(totals.items()) if name not in MUST_BE_ZERO},
            texts_checked=judgement.texts_checked,
        )

    def _worker(self, role: Role, number: int) -> WorkerSettings:
        """Return one of several kinds: with the plugin's digest and without, one that retokenises, clocks that differ."""
        return WorkerSettings(
            role=role,
            engine=EngineSettings(
                block_count=BLOCKS,
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                decoder_ttl_seconds=TTL_SECONDS,
                lease_seconds=LEASE_SECONDS,
                recompute_threshold_tokens=32,
                clock_offset_seconds=1000.0 * number,
                repaired=role == "decode" and number != 0,
            ),
            model=Model(mean_answer_tokens=10, emits_pairs=role == "decode" and number == 1),
            streams_handles=role == "decode",
            digests_handles=role == "decode" and number != 0,
        )

    def _client(self, limit: int) -> Generator[simpy.Event, Any, None]:
        dice, env = self.dice, self.env
        names, weights = list(ACTS), list(ACTS.values())
        yield env.timeout(dice.uniform(0, MEAN_GAP_SECONDS))
        while self.turns < limit:
            self._conversations += 1
            conversation = Conversation(env, dice, self._any_replica, self.judgement, self._conversations)
            for _ in range(1 + int(dice.expovariate(1 / TURNS_PER_CONVERSATION))):
                act = dice.choices(names, weights)[0]
                self.acts[act] += 1
                played = yield from conversation.turn(act)
                self.turns += played  # not in one: other clients count while this one waits
                self._strike()
                is_late = dice.random() < LATE
                yield env.timeout(
                    dice.expovariate(1 / MEAN_GAP_SECONDS) + is_late * dice.uniform(0.5, 1.5) * TTL_SECONDS
                )
                if self.turns >= limit:
                    return

    def _any_replica(self) -> Replica:
        return self.dice.choice(self.replicas)

    def _strike(self) -> None:
        """Let faults happen; and restart prefill workers that lost too many blocks, as their operator would."""
        dice = self.dice
        struck = [fault for fault, chance in FAULTS.items() if dice.random() < chance]
        self.faults.update(struck)
        if "restart decode" in struck:
            dice.choice(self.decode).restart(dice.choice((0.0, 0.0, 1.0)))
        if "restart prefill" in struck:
            dice.choice(self.prefill).restart(dice.choice((0.0, 0.0, 1.0)))
        if "crash gateway" in struck:
            self._any_replica().crash()
        if "drain" in struck:
            self._any_replica().drain()
        for worker in self.prefill:
            if worker.leaked_blocks > BLOCKS // 4:
                self.faults["restart leaking prefill"] += 1
                worker.restart(0.0)

    def _report(
        self, progress: Callable[[int, int], None], every: int, limit: int
    ) -> Generator[simpy.Event, Any, None]:
        told = 0
        while self.turns < limit:
            yield self.env.timeout(1.0)
            if self.turns - told >= every:
                told = self.turns
                progress(told, sum(worker.engine.counters.wrong_kv_turns for worker in (*self.prefill, *self.decode)))


def _sum(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return {str(name): count for name, count in sorted(total.items())}
