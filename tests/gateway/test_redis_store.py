"""The shared store by itself, on a real Redis: what it promises when the server is slow, frozen, away or full."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis_harness import PATIENCE_SECONDS, RedisServer
from structlog.testing import capture_logs

from extproc import proof
from extproc.errors import ConfigError
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.metrics import Metrics
from extproc.receipt import Reason
from extproc.redis_store import RedisStore
from extproc.settings import GatewaySettings
from extproc.store import Dropped, MemoryStore, StoredTurn

KEY = ConversationKey(b"k" * 16)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def turn(*, lifetime_seconds: float = 60.0, engine: str = "engine-a", number: int = 1) -> StoredTurn:
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": engine,
        "remote_request_id": f"request-{number}",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "remote_num_tokens": 40,
    }
    handle = read_publication(orjson.dumps(params)).handle
    return StoredTurn(handle, proof.fingerprint(range(40)), 32, "model", time.monotonic() + lifetime_seconds)


class Replica:
    """One process's store, and what it let go of."""

    def __init__(self, server: RedisServer, **settings: Any) -> None:
        self.released: list[Dropped] = []
        options = GatewaySettings(store_url=server.url, **{"worker_secret": "s", **settings})
        self.store = RedisStore(options, Metrics(MemoryStore(max_conversations=1, max_bytes=1)), self.released.extend)

    async def take(self, key: ConversationKey = KEY) -> StoredTurn | Reason | None:
        return await answer(self.store.take(key))

    async def put(self, kept: StoredTurn, key: ConversationKey = KEY) -> list[Dropped]:
        return await answer(self.store.put(key, kept))


async def answer(promised: Any) -> Any:
    return await promised if isinstance(promised, asyncio.Future) else promised


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not fact():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*replicas: Replica) -> Any:
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await replica.store.open()
            task = asyncio.create_task(replica.store.run())
            stack.callback(task.cancel)
        yield


def on(server: RedisServer, play: Callable[..., Awaitable[None]], replicas: int = 1, **settings: Any) -> None:
    """Play a scene with so many replicas."""

    async def scene() -> None:
        cast = [Replica(server, **settings) for _ in range(replicas)]
        async with running(*cast):
            await play(*cast)

    asyncio.run(scene())


def test_a_turn_put_by_one_process_is_taken_by_another_once(server: RedisServer) -> None:
    async def play(one: Replica, two: Replica) -> None:
        kept = turn()
        assert await one.put(kept) == []
        taken = await two.take()
        assert isinstance(taken, StoredTurn)
        assert (taken.handle, taken.sequence, taken.model) == (kept.handle, kept.sequence, kept.model)
        assert kept.deadline - 1 < taken.deadline <= kept.deadline
        assert [await one.take(), await two.take()] == [None, None]

    on(server, play, replicas=2)


def test_hazard_07_of_many_takes_at_once_exactly_one_wins(server: RedisServer) -> None:
    async def play(*replicas: Replica) -> None:
        for number in range(200):
            await replicas[0].put(turn(number=number))
            taken = await asyncio.gather(*(replica.take() for replica in replicas for _ in range(2)))
            assert sum(isinstance(result, StoredTurn) for result in taken) == 1
            assert taken.count(None) == len(taken) - 1

    on(server, play, replicas=3, store_timeout_seconds=PATIENCE_SECONDS)


def test_hazard_07_a_primary_that_was_a_replica_meanwhile_gives_no_used_turn_back(tmp_path: Path) -> None:
    """Fail-over and fail-back: the other server still has what was taken here, and copies it back."""
    (tmp_path / "other").mkdir()
    at_once = ("--repl-diskless-sync-delay", "0")
    with RedisServer(tmp_path, *at_once) as server, RedisServer(tmp_path / "other", *at_once) as other:

        def follows(follower: RedisServer) -> bool:
            return bool(follower.client().info("replication").get("master_link_status") == "up")

        async def play(replica: Replica) -> None:
            await replica.put(turn())
            await until(lambda: other.client().dbsize() == server.client().dbsize())
            other.client().replicaof("NO", "ONE")
            assert isinstance(await replica.take(), StoredTurn)
            server.client().replicaof("127.0.0.1", other.port)
            await until(lambda: follows(server))
            # The gateway looks at its server's clock and role once a second; a fail-back takes longer.
            await asyncio.sleep(2.5)
            server.client().replicaof("NO", "ONE")
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (taken := await replica.take()) is Reason.STORE_UNAVAILABLE and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert taken is None

        # Before the gateway connects: a server's first follower gives it a new history, too.
        other.client().replicaof("127.0.0.1", server.port)
        asyncio.run(until(lambda: follows(other)))
        on(server, play, store_timeout_seconds=1.0)


def test_a_newer_turn_supersedes_and_the_older_is_handed_back_for_release(server: RedisServer) -> None:
    async def play(one: Replica, two: Replica) -> None:
        older, newer = turn(number=1), turn(number=2)
        await one.put(older)
        (dropped,) = await two.put(newer)
        assert (dropped.turn.handle, dropped.reason) == (older.handle, "superseded")

    on(server, play, replicas=2)


def test_hazard_06_the_server_lets_turns_expire(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        await replica.put(turn(lifetime_seconds=0.2))
        await asyncio.sleep(0.3)
        assert await replica.take() is None
        await replica.put(turn(lifetime_seconds=-1.0))
        assert await replica.take() is None

    on(server, play)


def test_hazard_06_a_put_carried_out_late_does_not_outlive_its_deadline(server: RedisServer) -> None:
    """A server that stood still carries out what it was sent when it goes on, here after the turn's time."""

    async def play(replica: Replica) -> None:
        kept = turn(lifetime_seconds=1.0)
        server.freeze()
        try:
            assert await replica.put(kept) == [Dropped(kept, "unacknowledged")]
            assert await replica.take() is Reason.STORE_UNAVAILABLE
            await asyncio.sleep(1.1)
        finally:
            server.thaw()
        await until(lambda: replica.store.is_up)
        assert await replica.take() is None
        assert replica.released == []

    on(server, play, store_timeout_seconds=0.5)


def test_a_put_without_an_answer_is_not_released_because_it_may_be_found(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        kept = turn()
        server.freeze()
        try:
            assert await replica.put(kept) == [Dropped(kept, "unacknowledged")]
        finally:
            server.thaw()
        await until(lambda: replica.store.is_up)
        taken = await replica.take()
        assert isinstance(taken, StoredTurn)
        assert replica.released == []

    on(server, play, store_timeout_seconds=0.5)


@pytest.mark.parametrize("gives_up", ["the store", "the client"])
def test_what_was_taken_for_nobody_is_released(server: RedisServer, gives_up: str) -> None:
    async def play(replica: Replica) -> None:
        kept = turn()
        await replica.put(kept)
        server.freeze()
        try:
            taken = replica.store.take(KEY)
            assert isinstance(taken, asyncio.Future)
            if gives_up == "the store":
                assert await taken is Reason.STORE_UNAVAILABLE
            else:
                await asyncio.sleep(0.01)
                taken.cancel()
        finally:
            server.thaw()
        await until(lambda: bool(replica.released))
        ((dropped, reason),) = [(drop.turn, drop.reason) for drop in replica.released]
        assert (dropped.handle, reason) == (kept.handle, "abandoned")

    on(server, play, store_timeout_seconds=0.5)


def test_a_frozen_server_is_asked_no_more_until_it_answers(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        server.freeze()
        try:
            assert await replica.take() is Reason.STORE_UNAVAILABLE
            started = time.monotonic()
            for _ in range(1000):
                assert replica.store.take(KEY) is Reason.STORE_UNAVAILABLE
                assert isinstance(replica.store.put(KEY, turn()), list)
            assert time.monotonic() - started < PATIENCE_SECONDS
            assert not replica.store.is_up
        finally:
            server.thaw()
        await until(lambda: replica.store.is_up)
        assert await replica.put(turn()) == []

    on(server, play)


def test_a_server_that_comes_back_is_found_again_without_what_it_held(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        await replica.put(turn())
        server.kill()
        await until(lambda: not replica.store.is_up)
        kept = turn()
        assert replica.store.put(KEY, kept) == [Dropped(kept, "store_unavailable")]
        server.start()
        await until(lambda: replica.store.is_up)
        assert await replica.take() is None

    on(server, play)


def test_a_full_server_refuses_and_the_turn_is_handed_back_for_release(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        server.client().config_set("maxmemory", "1")
        kept = turn()
        assert await replica.put(kept) == [Dropped(kept, "store_refused")]

    on(server, play)


def test_hazard_13_a_new_engine_at_an_address_ends_the_old_ones_turns(server: RedisServer) -> None:
    async def play(one: Replica, two: Replica) -> None:
        await one.put(turn(engine="old"))
        await two.put(turn(engine="new"), ConversationKey(b"o" * 16))
        assert await one.take() is Reason.ENGINE_GONE

    on(server, play, replicas=2)


@pytest.mark.parametrize("value", [b"", b"garbage", b"KVLT\x02" + b"x" * 80])
def test_what_others_wrote_is_not_used(server: RedisServer, value: bytes) -> None:
    async def play(replica: Replica) -> None:
        await replica.put(turn())
        (name,) = server.client().scan_iter("kvloop:turn:*")
        server.client().set(name, value)
        assert await replica.take() is Reason.STORE_UNREADABLE
        assert await replica.take() is None

    on(server, play)


def test_a_value_of_another_kind_is_refused_and_costs_only_its_own_turn(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        await replica.put(turn())
        (name,) = server.client().scan_iter("kvloop:turn:*")
        server.client().delete(name)
        server.client().lpush(name, "x")
        assert await replica.take() is Reason.STORE_UNAVAILABLE
        assert (await replica.put(turn()))[0].reason == "store_refused"
        assert await replica.put(turn(), ConversationKey(b"o" * 16)) == []

    on(server, play)


def test_a_replica_with_another_secret_finds_nothing(server: RedisServer) -> None:
    async def play(one: Replica) -> None:
        other = Replica(server, worker_secret="another")
        async with running(other):
            await one.put(turn())
            assert await other.take() is None

    on(server, play)


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda client: client.execute_command("REPLICAOF", "127.0.0.1", "1"), "read-only replica"),
        (lambda client: client.execute_command("ACL", "SETUSER", "default", "-time"), "allow its user"),
        (lambda client: client.execute_command("ACL", "SETUSER", "default", "-info"), "allow it"),
    ],
    ids=["replica", "no time", "no info"],
)
def test_a_server_that_will_not_do_is_told_at_the_start(
    server: RedisServer, prepare: Callable[[Any], Any], told: str
) -> None:
    prepare(server.client())
    with pytest.raises(ConfigError, match=told):
        asyncio.run(Replica(server).store.open())


def test_the_rights_the_documentation_names_are_enough(server: RedisServer) -> None:
    from extproc.redis_link import PERMISSIONS  # noqa: PLC0415 - the words a person is told

    server.client().execute_command("ACL", "SETUSER", "kvloop", "on", ">pass-word", *PERMISSIONS.split())
    server.url = server.url.replace("redis://", "redis://kvloop@")

    async def play(replica: Replica) -> None:
        assert await replica.put(turn()) == []
        assert isinstance(await replica.take(), StoredTurn)

    on(server, play, store_password="pass-word")


def test_a_server_that_became_a_replica_is_left_for_the_primary(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
        assert (await replica.put(turn()))[0].reason == "store_refused"
        await until(lambda: not replica.store.is_up)
        server.client().execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: replica.store.is_up)
        assert await replica.put(turn()) == []

    on(server, play)


def test_a_taken_turn_is_given_back_unless_a_newer_one_is_kept(server: RedisServer) -> None:
    async def play(one: Replica, two: Replica) -> None:
        older, newer = turn(number=1), turn(number=2)
        await one.put(older)
        taken = await one.take()
        assert isinstance(taken, StoredTurn)
        assert await answer(one.store.restore(KEY, taken)) == []
        taken = await two.take()
        assert isinstance(taken, StoredTurn)
        assert taken.handle == older.handle
        await one.put(newer)
        assert await answer(two.store.restore(KEY, taken)) == [Dropped(taken, "superseded")]
        found = await two.take()
        assert isinstance(found, StoredTurn)
        assert found.handle == newer.handle

    on(server, play, replicas=2)


def test_a_turn_given_back_while_the_store_is_away_is_handed_back_for_release(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        server.kill()
        await until(lambda: not replica.store.is_up)
        kept = turn()
        assert replica.store.restore(KEY, kept) == [Dropped(kept, "store_unavailable")]

    on(server, play)


def test_engines_are_found_by_what_their_handles_say(server: RedisServer) -> None:
    async def play(replica: Replica) -> None:
        await replica.put(turn(engine="engine-a"))
        for name in ("engine-a", "10.0.0.7", "10.0.0.7:5600"):
            assert replica.store.find_engines(name) == ["engine-a"]
        assert replica.store.find_engines("10.0.0.8") == []

    on(server, play)


def test_a_store_that_is_away_from_the_start_on_is_told_once_with_the_fix() -> None:
    options = GatewaySettings(store_url="redis://127.0.0.1:1", worker_secret="s")
    store = RedisStore(options, Metrics(MemoryStore(max_conversations=1, max_bytes=1)), lambda _: None)

    async def run() -> None:
        await store.open()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):
                await store.run()

    with capture_logs() as logs:
        asyncio.run(run())
    (told,) = logs
    assert (told["log_level"], told["event"]) == ("warning", "store_unavailable")
    assert "KVLOOP_STORE_URL" in told["fix"]
