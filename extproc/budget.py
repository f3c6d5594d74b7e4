"""How much of each decode engine's memory kept turns may pin, and which of them go first when it is too much.

The ledger is fed with what this process keeps, takes back and drops; it reads no clock and no metrics. What another process
took out of a shared store stays in the ledger until its deadline, so that it counts too much rather than too little.

* **Cap.** A share of the engine's KV capacity, or a set number of tokens. While the engine's own usage is above the pressure
  mark, or requests wait there although half of it is in use, the cap falls below what is retained now; with the pressure
  gone it grows back, a tenth of its full size at a time.
* **Value.** What a kept turn saves if its conversation comes back are the tokens P need not compute, less what a read costs in any
  case; how likely that is, ``gaps`` has learnt. Memory is what is short, so turns go in order of expected saving *per token
  retained*, the least first: by the plain product, one long and hopeless turn would outlive a hundred short and likely ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from extproc.gaps import GapStatistics, interval_of

if TYPE_CHECKING:
    from extproc.identity import ConversationKey
    from extproc.worker_metrics import EngineLoad

TRIMMED_TO: Final = 0.95
"""A cap that is passed is trimmed to this part of it, so that not every turn at the brink has to look at all others."""

RECOVERY: Final = 0.1
BUSY_USAGE: Final = 0.5
"""Requests that wait below this usage wait for something else than KV memory."""


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """The settings of the same names. ``share`` and ``pressure`` are parts of the engine's KV capacity, 0 to 1."""

    share: float
    max_tokens: int | None
    pressure: float
    read_cost_tokens: int


@dataclass(slots=True)
class Entry:
    """One kept turn. ``tokens``: what it pins, in whole blocks. Times are monotonic seconds."""

    engine_id: str
    tokens: int
    kind: str
    since: float
    deadline: float
    interval: int = 0


@dataclass(slots=True)
class _Engine:
    entries: dict[ConversationKey, Entry] = field(default_factory=dict)
    tokens: int = 0
    cap: int | None = None
    load: EngineLoad | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class EngineRetention:
    """What one decode engine retains for this process, and what it may: tokens; None: not known yet, so no cap."""

    engine_id: str
    turns: int
    tokens: int
    cap: int | None
    usage: float | None


class Ledger:
    """What this process has decode engines retain."""

    def __init__(self, rules: BudgetRules) -> None:
        self.gaps = GapStatistics()
        self._rules = rules
        self._entries: dict[ConversationKey, Entry] = {}
        self._engines: dict[str, _Engine] = {}
        self._elsewhere: dict[ConversationKey, Entry] = {}

    # --- what happened ----------------------------------------------------------------------------------------------

    def kept(self, key: ConversationKey, entry: Entry, address: str | None = None) -> None:
        """Note a kept turn, and the HTTP address (``ip:port``) its engine answers at; replaces an earlier turn."""
        self.dropped(key)
        engine = self._engines.get(entry.engine_id)
        if engine is None:
            engine = self._engines[entry.engine_id] = _Engine(cap=self._rules.max_tokens)
        engine.entries[key] = self._entries[key] = entry
        engine.tokens += entry.tokens
        engine.address = address or engine.address
        self.gaps.entered(entry.kind, 0)

    def taken(self, key: ConversationKey, now: float) -> None:
        """Note that a conversation came back."""
        entry = self._remove(key) or self._elsewhere.pop(key, None)
        if entry is not None:
            self._advance(entry, now)
            self.gaps.returned(entry.kind, entry.interval)

    def dropped(self, key: ConversationKey) -> None:
        """Note that a turn is not kept any more, whatever the reason."""
        self._remove(key)
        self._elsewhere.pop(key, None)

    def returned(self, key: ConversationKey) -> None:
        """Note that P has read a turn back: its engine is free of it, but whether the conversation returns is still to be seen."""
        entry = self._remove(key)
        if entry is not None:
            self._elsewhere[key] = entry

    def chance(self, key: ConversationKey, now: float) -> float:
        """Return how likely a conversation is to come back before its deadline, 0 to 1; 0 for one not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return 0.0
        return self.gaps.chances(entry.kind, entry.deadline - entry.since)[interval_of(now - entry.since)]

    def observed(self, engine_id: str, load: EngineLoad | None, leaving_tokens: int = 0) -> None:
        """Take the engine's own word on its memory, and set its cap by it; ``None``: it did not answer.

        ``leaving_tokens`` are on their way out already, but still in the engine's figures.
        """
        engine = self._engines[engine_id]
        engine.load = load
        if load is None:
            if not engine.entries:
                del self._engines[engine_id]
            return
        full = self._rules.max_tokens
        if full is None and load.capacity_tokens is not None:
            full = int(load.capacity_tokens * self._rules.share)
        surplus = max(0, self._surplus(engine, load) - leaving_tokens)
        if surplus:
            engine.cap = max(0, min(engine.tokens - surplus, engine.tokens if engine.cap is None else engine.cap))
        elif full is not None:
            engine.cap = full if engine.cap is None else min(full, engine.cap + int(full * RECOVERY) + 1)

    def _surplus(self, engine: _Engine, load: EngineLoad) -> int:
        """Return how many retained tokens the engine needs back now."""
        if load.waiting and load.usage > BUSY_USAGE:
            return -(-engine.tokens // 2)
        if load.usage > self._rules.pressure and load.capacity_tokens is not None:
            return int((load.usage - self._rules.pressure) * load.capacity_tokens) + 1
        return 0

    # --- what follows -----------------------------------------------------------------------------------------------

    def excess(self, engine_id: str, now: float) -> list[ConversationKey]:
        """Return the conversations to let go of, least valuable first, so that the engine's cap holds again."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.cap is None or engine.tokens <= engine.cap:
            return []
        values = self._values(engine, now)
        to_free = engine.tokens - int(engine.cap * TRIMMED_TO)
        excess: list[ConversationKey] = []
        for key in sorted(values, key=values.__getitem__):
            if to_free <= 0:
                break
            to_free -= engine.entries[key].tokens
            excess.append(key)
        return excess

    def expire(self, now: float) -> None:
        """Forget turns whose deadline is past, and let the others grow older."""
        for key, entry in [*self._entries.items(), *self._elsewhere.items()]:
            self._advance(entry, now)
            if entry.deadline <= now:
                self.dropped(key)

    def watched(self) -> list[tuple[str, str]]:
        """Return the engines that retain something and can be asked: (engine id, HTTP address)."""
        return [(engine_id, engine.address) for engine_id, engine in self._engines.items() if engine.address]

    def under_pressure(self, engine_id: str) -> bool:
        """Tell whether the engine last said that it needs memory back."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.load is not None and self._surplus(engine, engine.load) > 0

    def engines(self) -> list[EngineRetention]:
        """Return how things stand, engine by engine."""
        return [
            EngineRetention(
                engine_id,
                len(engine.entries),
                engine.tokens,
                engine.cap,
                None if engine.load is None else engine.load.usage,
            )
            for engine_id, engine in self._engines.items()
        ]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _remove(self, key: ConversationKey) -> Entry | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        engine = self._engines[entry.engine_id]
        del engine.entries[key]
        engine.tokens -= entry.tokens
        return entry

    def _advance(self, entry: Entry, now: float) -> None:
        """Count a waiting turn into the intervals it has reached meanwhile."""
        reached = interval_of(now - entry.since)
        while entry.interval < reached:
            entry.interval += 1
            self.gaps.entered(entry.kind, entry.interval)

    def _values(self, engine: _Engine, now: float) -> dict[ConversationKey, float]:
        """Return the expected saving per retained token, 0 to 1, of all an engine retains."""
        tables: dict[tuple[str, int], list[float]] = {}
        values: dict[ConversationKey, float] = {}
        for key, entry in engine.entries.items():
            kind = entry.kind, round(entry.deadline - entry.since)
            if kind not in tables:
                tables[kind] = self.gaps.chances(*kind)
            saved = max(0, entry.tokens - self._rules.read_cost_tokens)
            values[key] = tables[kind][interval_of(now - entry.since)] * saved / entry.tokens
        return values
