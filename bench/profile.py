"""What traffic is like: conversations as a profile describes them, or as a trace recorded them. Pure and seeded.

A profile is JSON; see ``profiles/``. Conversations arrive by a Poisson process (``conversations_per_second``) whatever
becomes of the earlier ones; or, with ``concurrency`` instead, so many are always under way. Each quantity is drawn from
one of ``{"constant": x}``, ``{"uniform": [a, b]}``, ``{"exponential": mean}``, ``{"geometric": mean}`` (1 and more) or
``{"lognormal": [median, sigma]}``, cut at ``max`` if given.

A trace is JSON lines, one per turn: ``{"at_seconds": 1.5, "conversation": "a", "prompt_tokens": 40, "answer_tokens": 90}``
where ``prompt_tokens`` counts what the turn adds. A turn goes out at its time, or when the one before it has ended.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import orjson

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

QUANTITIES: Final = ("turns", "gap_seconds", "first_prompt_tokens", "next_prompt_tokens", "answer_tokens")
ARRIVALS: Final = ("conversations_per_second", "concurrency")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A random number: how it is distributed, its parameters, its upper bound."""

    kind: str
    values: tuple[float, ...]
    maximum: float = math.inf

    def draw(self, dice: Random) -> float:
        """Return one."""
        match self.kind, self.values:
            case "constant", (value,):
                drawn = value
            case "uniform", (low, high):
                drawn = dice.uniform(low, high)
            case "exponential", (mean,):
                drawn = dice.expovariate(1 / mean) if mean else 0.0
            case "geometric", (mean,):
                # log(1) is 0: a mean of 1 always gives 1.
                drawn = 1 + (math.floor(math.log(1 - dice.random()) / math.log(1 - 1 / mean)) if mean > 1 else 0)
            case "lognormal", (median, sigma):
                drawn = dice.lognormvariate(math.log(median), sigma)
            case _:
                raise ConfigError(f"no such distribution: {self.kind} with {len(self.values)} values")
        return min(drawn, self.maximum)

    def draw_count(self, dice: Random) -> int:
        """Return one as a whole number, at least 1."""
        return max(1, round(self.draw(dice)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: earliest time it may go out (seconds since the start, if a trace says), else the pause before it."""

    prompt_tokens: int
    answer_tokens: int
    gap_seconds: float = 0.0
    at_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns of one conversation. ``starts_at`` in seconds since the start; ``None``: when a place is free."""

    name: str
    turns: tuple[Turn, ...]
    starts_at: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Traffic, described."""

    quantities: dict[str, Quantity]
    conversations_per_second: float | None = None
    concurrency: int | None = None
    about: str = ""

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Return conversations in order of their start, without end."""
        dice = Random(seed)
        clock = 0.0
        for number in itertools.count():
            if self.conversations_per_second is not None:
                clock += dice.expovariate(self.conversations_per_second)
            yield Conversation(f"{seed}-{number}", tuple(self._turns(dice)), None if self.concurrency else clock)

    def _turns(self, dice: Random) -> Iterator[Turn]:
        draws = self.quantities
        for number in range(draws["turns"].draw_count(dice)):
            prompt = draws["next_prompt_tokens" if number else "first_prompt_tokens"].draw_count(dice)
            gap = draws["gap_seconds"].draw(dice) if number else 0.0
            yield Turn(prompt, draws["answer_tokens"].draw_count(dice), gap)


def read_profile(name: str) -> Profile:
    """Read a shipped profile by name, or any other by its path; raises ``ConfigError``."""
    shipped = files("bench") / "profiles" / f"{name}.json"
    source = shipped if shipped.is_file() else Path(name)
    try:
        text = source.read_bytes()
    except OSError as error:
        known = ", ".join(shipped_profiles())
        raise ConfigError(f"no profile {name}: neither a file nor one of {known}") from error
    return parse_profile(text, name)


def parse_profile(text: bytes, name: str) -> Profile:
    """Understand a profile's JSON; raises ``ConfigError``."""
    try:
        fields = orjson.loads(text)
        quantities = {quantity: _quantity(fields.pop(quantity)) for quantity in QUANTITIES}
        about = fields.pop("about", "")
        arrivals = {kind: fields.pop(kind) for kind in ARRIVALS if kind in fields}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"profile {name}: {error!r}") from error
    if fields or len(arrivals) != 1:
        raise ConfigError(f"profile {name}: wants one of {' and '.join(ARRIVALS)}; unknown: {sorted(fields)}")
    return Profile(quantities, about=about, **arrivals)


def shipped_profiles() -> list[str]:
    """Return the names of the profiles that come with kvloop."""
    return sorted(entry.name.removesuffix(".json") for entry in (files("bench") / "profiles").iterdir())


def read_trace(lines: Iterable[bytes]) -> list[Conversation]:
    """Return a trace's conversations in order of their start; raises ``ConfigError`` for a line it cannot read."""
    turns: dict[str, list[Turn]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = orjson.loads(line)
            name = str(fields["conversation"])
            turn = Turn(int(fields["prompt_tokens"]), int(fields["answer_tokens"]), 0.0, float(fields["at_seconds"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"trace, line {number}: {error!r}") from error
        turns.setdefault(name, []).append(turn)
    conversations = [Conversation(name, tuple(each), each[0].at_seconds) for name, each in turns.items()]
    return sorted(conversations, key=lambda conversation: conversation.starts_at or 0.0)


def _quantity(spec: dict[str, Any]) -> Quantity:
    given = dict(spec)
    maximum = float(given.pop("max", math.inf))
    ((kind, values),) = given.items()
    quantity = Quantity(kind, tuple(values) if isinstance(values, list) else (values,), maximum)
    quantity.draw(Random(0))
    return quantity
