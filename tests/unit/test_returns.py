"""Early returns: in nobody's way, each handle used once, and what does not come about stays on D."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson
import pytest
from world import BLOCK_SIZE, FOR_DECODE, handle_params

from extproc import returns
from extproc.events import Call, Keep, LegResult, Returning, header
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.proof import fingerprint
from extproc.returns import ReturnPorts, ReturnQueue
from extproc.settings import GatewaySettings
from extproc.store import ReturnedTurn, StoredTurn

TOKENS = 1000
KEY = ConversationKey(b"k" * 16)
TURN = StoredTurn(read_publication(orjson.dumps(handle_params(TOKENS))).handle, fingerprint([]), BLOCK_SIZE, "m", 1e9)


@dataclass
class Played:
    """What a gateway saw of its returns."""

    status: int = 200
    cached: int = TOKENS
    busy: bool = False
    claims: bool = True
    error: Exception | None = None
    calls: list[Call] = field(default_factory=list)
    noted: list[ReturnedTurn | None] = field(default_factory=list)
    refused: list[StoredTurn] = field(default_factory=list)
    unread: list[StoredTurn] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    leased: int = 0

    async def call(self, call: Call) -> LegResult:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        params = FOR_DECODE | {"remote_prefill_cached_tokens": self.cached}
        body = orjson.dumps({"kv_transfer_params": params, "choices": [{"prompt_token_ids": [1]}]})
        return LegResult(self.status, body, 0.0, 0.0)

    def play(self, count: int = 1, **settings: int) -> Played:
        """Queue ``count`` returns and wait until each has come to something."""

        async def run() -> None:
            done = asyncio.Event()

            def note(result: str) -> None:
                self.counted.append(result)
                if len(self.counted) == count:
                    done.set()

            ports = ReturnPorts(
                call=self.call,
                is_busy=lambda: self.busy,
                claim=lambda _key, _turn: self.claims,
                returned=lambda _key, turn: self.noted.append(turn),
                refused=self.refused.append,
                unread=self.unread.append,
                count=note,
            )
            queue = ReturnQueue(GatewaySettings(**settings), ports)  # type: ignore[arg-type]
            for _ in range(count):
                queue.add(Keep(KEY, TURN, returning=Returning(b"{}", TOKENS)))
            running = asyncio.create_task(queue.run())
            async with asyncio.timeout(30):
                await done.wait()
            assert not running.done()
            self.leased = queue.leased_tokens
            running.cancel()

        asyncio.run(run())
        return self


def test_a_return_goes_to_the_conversation_s_p_and_is_noted_before_p_has_answered() -> None:
    played = Played().play()
    (call,) = played.calls
    names = ("x-kvloop-leg", "x-kvloop-conversation")
    assert [header(call.headers, name) for name in names] == ["return", str(KEY)]
    assert (played.counted, played.leased) == (["returned"], TOKENS)
    assert played.noted == [ReturnedTurn(TURN.sequence, TOKENS)]


@pytest.mark.parametrize(("status", "cached", "released"), [(503, TOKENS, 0), (200, 0, 0), (400, TOKENS, 1)])
def test_a_return_that_fails_is_noted_as_lost(status: int, cached: int, released: int) -> None:
    played = Played(status=status, cached=cached).play()
    assert played.counted == ["failed"]
    assert played.noted[-1] is None
    assert len(played.refused) == released
    assert len(played.unread) == 1 - released, "D is told, but only once P cannot be reading any more"


def test_a_return_that_raises_ends_no_other() -> None:
    played = Played(error=RuntimeError("unforeseen")).play(3)
    assert played.counted == ["failed"] * 3


def test_users_prefills_go_first_and_the_turn_stays_on_d(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "PATIENCE_SECONDS", 0.05)
    played = Played(busy=True).play()
    assert (played.counted, played.calls, played.noted) == (["busy"], [], [])


def test_a_turn_that_the_user_was_faster_with_is_left_alone() -> None:
    played = Played(claims=False).play()
    assert (played.counted, played.calls, played.noted) == (["overtaken"], [], [])


def test_what_p_holds_under_leases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(Played().play(3, return_max_leased_tokens=2 * TOKENS).counted) == [
        "leases_full",
        "returned",
        "returned",
    ]
    monkeypatch.setattr(returns, "LEASE_SECONDS", 0.0)
    assert Played().play(3, return_max_leased_tokens=TOKENS).counted == ["returned"] * 3


def test_beyond_the_bound_returns_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "WAITING_AT_MOST", 2)
    assert sorted(Played().play(3).counted) == ["queue_full", "returned", "returned"]
