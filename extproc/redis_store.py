"""The store several processes share: kept turns in Redis or Valkey, with the same promises as ``MemoryStore``.

Rules that must stay true:

* A turn is given out at most once: GETDEL takes it, on one server process, whose run id is part of its name.
* It is given out only before its deadline, whatever any clock does (``server_clock``), and however late the server
  carried a command out: PXAT is a moment, not a time span that starts when the command is read.
* Nobody waits for the store longer than ``store_timeout_seconds``. While an answer is overdue nothing more is asked.
* Blocks are released on D only where it is certain that no other process can find the handle any more. A put without
  an answer may have been carried out: its handle is neither used nor released by us.

What the server lets expire is not released either: by then D has let go of it itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
from redis.exceptions import ReadOnlyError

from extproc.receipt import Reason
from extproc.redis_link import (
    PASSING,
    PERMISSIONS,
    CommandRefused,
    Link,
    LinkBroken,
    StoreMisconfigured,
    connection_maker,
)
from extproc.server_clock import ServerClock
from extproc.store import Dropped, StoredTurn
from extproc.store_format import StoreFormat, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from extproc.identity import ConversationKey
    from extproc.metrics import Metrics
    from extproc.settings import GatewaySettings

_CLOCK_INTERVAL_SECONDS: Final = 1.0
_GIVEN_UP_AFTER_SECONDS: Final = 5.0
"""A server that has not answered for so long is connected to anew: it may be another one by then."""

_ENGINES_KNOWN: Final = 10_000
_RETRY_SECONDS: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_CLOCK_ROUND_TRIP_SECONDS: Final = 0.25

log = structlog.get_logger()


class Server(NamedTuple):
    """A connection, and how things are spelled on the server process at its other end."""

    link: Link
    spelling: StoreFormat


class RedisStore:
    """Kept turns on a server. Belongs to one event loop; ``release`` gets every turn whose KV nobody will ask for."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics, release: Callable[[list[Dropped]], None]) -> None:
        secret = settings.worker_secret.get_secret_value() if settings.worker_secret else ""
        self._secret = secret.encode()
        self._timeout_seconds = settings.store_timeout_seconds
        self._ttl_seconds = settings.handle_ttl_seconds
        self._make_connection = connection_maker(settings)
        self._metrics = metrics
        self._release = release
        self._clock = ServerClock(self._ttl_seconds, max(_CLOCK_ROUND_TRIP_SECONDS, self._timeout_seconds))
        self._server: Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._complaint = ""
        self._engines: dict[tuple[str, int], str] = {}

    # --- what an exchange asks for ----------------------------------------------------------------------------------

    def take(self, key: ConversationKey) -> StoredTurn | Reason | asyncio.Future[StoredTurn | Reason | None] | None:
        """Remove and return the conversation's turn, None if there is none, or why it cannot be had.

        Cancel the future when nobody waits any more: what it would have brought is released.
        """
        server = self._ready_server()
        if server is None:
            self._metrics.store_unanswered("take", "unavailable")
            return Reason.STORE_UNAVAILABLE
        return self._promise("take", self._take(server, key), Reason.STORE_UNAVAILABLE, self._release_unclaimed)

    def put(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped] | asyncio.Future[list[Dropped]]:
        """Keep ``turn``, and return what made room for it: what was kept before, or ``turn`` itself."""
        server = self._ready_server()
        if server is None:
            self._metrics.store_unanswered("put", "unavailable")
            return [Dropped(turn, "store_unavailable")]
        return self._promise("put", self._put(server, key, turn), [Dropped(turn, "unacknowledged")], self._release)

    def restore(self, key: ConversationKey, turn: StoredTurn) -> list[Dropped] | asyncio.Future[list[Dropped]]:
        """Keep a taken turn again, unless another one is kept by now: then return it."""
        server = self._ready_server()
        if server is None:
            return [Dropped(turn, "store_unavailable")]
        work = self._put(server, key, turn, only_if_free=True)
        return self._promise("put", work, [Dropped(turn, "unacknowledged")], self._release)

    def find_engines(self, name: str) -> list[str]:
        """Return the ids of engines by an engine id, or the ``host`` or ``host:port`` of handles this process has put."""
        return [engine for (host, port), engine in self._engines.items() if name in (engine, host, f"{host}:{port}")]

    def discard_engine(self, engine_id: str, reason: str = "engine_gone") -> list[Dropped]:  # noqa: ARG002
        """Return nothing: whose a kept turn is can only be told by whoever takes it."""
        return []

    def expire(self, now: float) -> list[Dropped]:  # noqa: ARG002 - the server looks at its own clock
        """Return nothing: the server lets turns expire, and D has let go of them by then."""
        return []

    def drain(self) -> list[Dropped]:
        """Return nothing: the other processes, or the next one, go on with what is kept."""
        return []

    async def _take(self, server: Server, key: ConversationKey) -> StoredTurn | Reason | None:
        link, spelling = server
        turn: StoredTurn | Unreadable | None = None
        try:
            (value,) = await link.request(("GETDEL", spelling.turn_name(key)))
            if value is None:
                return None
            if isinstance(value, CommandRefused):
                self._refused(link, "GETDEL", value)
                return Reason.STORE_UNAVAILABLE
            turn = spelling.decode(key, value)
            if isinstance(turn, Unreadable):
                log.warning("stored_turn_unreadable", cause=turn.cause)
                return Reason.STORE_UNREADABLE
            turn = replace(turn, deadline=self._clock.from_server(turn.deadline))
            (engine,) = await link.request(("GET", spelling.engine_name(turn.handle)))
        except LinkBroken:
            if isinstance(turn, StoredTurn):
                self._release_unclaimed(turn)  # it is out of the store, and will not be used
            return Reason.STORE_UNAVAILABLE
        # Another engine has been seen at its address since: D restarted, and what the old engine held is gone.
        return turn if engine == spelling.engine_mark(turn.handle) else Reason.ENGINE_GONE

    async def _put(
        self, server: Server, key: ConversationKey, turn: StoredTurn, *, only_if_free: bool = False
    ) -> list[Dropped]:
        link, spelling = server
        deadline_ms = int(self._clock.to_server(turn.deadline) * 1000)
        value = spelling.encode(key, turn, deadline_ms)
        engine = (spelling.engine_name(turn.handle), spelling.engine_mark(turn.handle))
        self._note_engine(turn)
        try:
            _, previous = await link.request(
                ("SET", *engine, "PX", int(self._ttl_seconds * 1000), *(["NX"] if only_if_free else [])),
                ("SET", spelling.turn_name(key), value, "PXAT", deadline_ms, "NX" if only_if_free else "GET"),
            )
        except LinkBroken:
            return [Dropped(turn, "unacknowledged")]
        if isinstance(previous, CommandRefused):
            self._refused(link, "SET", previous)
            return [Dropped(turn, "store_refused")]
        if only_if_free:
            return [Dropped(turn, "superseded")] if previous is None else []
        displaced = None if previous is None else spelling.decode(key, previous)
        return [Dropped(displaced, "superseded")] if isinstance(displaced, StoredTurn) else []

    def _refused(self, link: Link, command: str, refusal: CommandRefused) -> None:
        self._complain(f"the store refused {command}: {refusal}")
        if isinstance(refusal, ReadOnlyError):
            # It was the primary once. Whoever is now is found by connecting again.
            self._start(link.close())

    def _note_engine(self, turn: StoredTurn) -> None:
        if len(self._engines) >= _ENGINES_KNOWN:
            del self._engines[next(iter(self._engines))]
        self._engines[turn.handle.host, turn.handle.port] = turn.handle.engine_id

    # --- waiting no longer than allowed -----------------------------------------------------------------------------

    def _promise(
        self, operation: str, work: Coroutine[Any, Any, Any], otherwise: Any, unclaimed: Callable[[Any], None]
    ) -> asyncio.Future[Any]:
        """Return the work's result as a future that has ``otherwise`` when it takes too long.

        The work goes on to its end all the same; ``unclaimed`` gets a result that came too late for anybody.
        """
        loop = asyncio.get_running_loop()
        promise: asyncio.Future[Any] = loop.create_future()

        def give_up() -> None:
            if not promise.done():
                self._metrics.store_unanswered(operation, "timeout")
                promise.set_result(otherwise)

        def settle(done: asyncio.Task[Any]) -> None:
            self._tasks.discard(done)
            timer.cancel()
            if done.cancelled():
                give_up()
            elif (error := done.exception()) is not None:
                log.error("store_failed", exc_info=error)
                give_up()
            elif promise.done():
                unclaimed(done.result())
            else:
                promise.set_result(done.result())

        timer = loop.call_later(self._timeout_seconds, give_up)
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(settle)
        return promise

    def _release_unclaimed(self, taken: StoredTurn | Reason | None) -> None:
        if isinstance(taken, StoredTurn):
            self._release([Dropped(taken, "abandoned")])

    # --- the connection ---------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the store is asked at present."""
        return self._ready_server() is not None

    async def open(self) -> None:
        """Connect for the first time; raises ``ConfigError`` for what will not pass by itself.

        A server that is merely away is no reason not to start: turns are cold until it is back.
        """
        try:
            await self._connect()
        except PASSING as error:
            self._complain(str(error) or type(error).__name__)

    async def run(self) -> None:
        """Keep the connection and the server's clock, until cancelled."""
        try:
            failures = 0
            while True:
                if self._server is None:
                    failures += 1
                    await self._connect_again()
                if self._server is None:
                    wait = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS)) - 1]
                    # Replicas that lost the server together shall not all come back together.
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
                else:
                    failures = 0
                    await self._watch(self._server.link)
        finally:
            await self._disconnect()

    async def _watch(self, link: Link) -> None:
        """Read the server's clock again and again while it answers; drop the connection when it does not."""
        self._start(self._read_clock(link))
        try:
            async with asyncio.timeout(_CLOCK_INTERVAL_SECONDS):
                await link.closed.wait()
        except TimeoutError:
            if link.overdue_seconds() < _GIVEN_UP_AFTER_SECONDS:
                return
        self._complain("the store is away: it answers no more")
        await self._disconnect()

    async def _connect_again(self) -> None:
        try:
            await self._connect()
        except (StoreMisconfigured, *PASSING) as error:
            self._complain(str(error) or type(error).__name__)

    async def _connect(self) -> None:
        link = await Link.open(self._make_connection)
        try:
            async with asyncio.timeout(self._timeout_seconds + _CLOCK_ROUND_TRIP_SECONDS):
                await self._learn_clock(link)
        except BaseException:
            await link.close()
            raise
        self._server = Server(link, StoreFormat(self._secret, link.facts.run_id + link.facts.replication_id))
        self._complaint = ""
        log.info("store_connected", version=link.facts.version)

    async def _disconnect(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.link.close()

    async def _learn_clock(self, link: Link) -> None:
        refusal = await self._read_clock(link)
        if refusal is not None:
            raise StoreMisconfigured(f"the store refused TIME ({refusal}): allow its user {PERMISSIONS}")
        if not self._clock.is_known:
            raise TimeoutError("the store answers too slowly to tell the time")

    async def _read_clock(self, link: Link) -> CommandRefused | None:
        asked_at = time.monotonic()
        try:
            answer, replication = await link.request(("TIME",), ("INFO", "replication"))
        except LinkBroken:
            return None
        if isinstance(answer, CommandRefused):
            return answer
        if isinstance(replication, bytes) and link.facts.replication_id.encode() not in replication:
            # It was a replica meanwhile, and may have got back from another primary what had been taken from it.
            self._start(link.close())
            return None
        seconds, microseconds = answer
        self._clock.note(asked_at, int(seconds) + int(microseconds) / 1_000_000, time.monotonic())
        return None

    def _ready_server(self) -> Server | None:
        server = self._server
        return server if server is not None and server.link.overdue_seconds() <= self._timeout_seconds else None

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _complain(self, complaint: str) -> None:
        """Log what is wrong, once until it is something else."""
        if complaint != self._complaint:
            self._complaint = complaint
            effect, fix = (
                "turns are cold until it is back",
                "start the store, or mend KVLOOP_STORE_URL; `kvloop doctor` examines it",
            )
            log.warning("store_unavailable", reason=complaint, effect=effect, fix=fix)
