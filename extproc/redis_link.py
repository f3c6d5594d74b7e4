"""One connection to a Redis or Valkey server, used by everybody at once: commands go out as they come, answers come in order.

redis-py connects, authenticates, speaks TLS and the protocol. What its pools cannot give is here: a command that was given
up keeps its place in the order, so that its late answer is still seen; and every answer is known to come from one and the
same server process.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.settings import GatewaySettings

CONNECT_TIMEOUT_SECONDS: Final = 2.0
OLDEST_VERSION: Final = (6, 2)
"""The first with GETDEL and SET ... GET PXAT."""

PERMISSIONS: Final = "~kvloop:* +info +time +set +get +getdel"
"""What the store's user must be allowed, in the words of Redis' access lists."""

LinkBroken = RedisConnectionError
"""The connection ended before the answer: whether the command was carried out is unknown."""

CommandRefused = ResponseError
"""The server said no: the command was not carried out."""

PASSING = (RedisError, OSError, TimeoutError)
"""What keeps a connection from being made, but may pass by itself."""

AnyConnection = Connection | UnixDomainSocketConnection


class StoreMisconfigured(ConfigError):
    """The store cannot be used until somebody changes something; the message says what."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says of itself: ``run_id`` is new with every start, ``replication_id`` with every promotion."""

    run_id: str
    replication_id: str
    version: str
    role: str
    eviction: str


def connection_maker(settings: GatewaySettings) -> Callable[[], AnyConnection]:
    """Return what makes connections to ``KVLOOP_STORE_URL``; raises ``ConfigError`` if it cannot be one."""
    assert settings.store_url is not None  # noqa: S101 - the caller looked
    url = settings.store_url.get_secret_value()
    try:
        _ = urlsplit(url).port
    except ValueError:
        # Python would quote what it takes for the port, which may be part of the password.
        raise ConfigError(
            "KVLOOP_STORE_URL: its port is no number; percent-encode what is special in the password, or set"
            " KVLOOP_STORE_PASSWORD"
        ) from None
    try:
        options: dict[str, Any] = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        if settings.store_password is not None:
            options["password"] = settings.store_password.get_secret_value()
        if settings.store_ca_file is not None:
            if kind is not SSLConnection:
                raise ConfigError("KVLOOP_STORE_CA_FILE is set, but KVLOOP_STORE_URL does not start with rediss://")
            options["ssl_ca_certs"] = settings.store_ca_file
        # No time limit on reading: answers are waited for by their senders, each as long as it can.
        options |= {"socket_timeout": None, "socket_connect_timeout": CONNECT_TIMEOUT_SECONDS, "protocol": 2}

        def make() -> AnyConnection:
            connection: AnyConnection = kind(**options)
            return connection

        make()
    except (TypeError, ValueError, RedisError) as error:
        raise ConfigError(f"KVLOOP_STORE_URL: {error}") from None
    return make


class Link:
    """An open connection. ``request`` may be called by many at once; ``close`` fails whoever still waits."""

    def __init__(self, connection: AnyConnection, facts: ServerFacts) -> None:
        self.facts = facts
        self._connection = connection
        self._pending: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._reader = asyncio.create_task(self._read())
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, make: Callable[[], AnyConnection]) -> Link:
        """Connect and find out to whom.

        Raises ``StoreMisconfigured`` for what only a person can mend, one of ``PASSING`` for what may pass.
        """
        connection = make()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                await connection.connect()  # type: ignore[no-untyped-call] # redis-py types its users' side
                await connection.send_command("INFO", check_health=False)
                facts = _read_facts(await connection.read_response())
        except BaseException as error:
            await connection.disconnect(nowait=True)
            cause = _misconfiguration(error)
            if cause is not None:
                raise StoreMisconfigured(cause) from None
            raise
        return cls(connection, facts)

    async def request(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands together and return their answers in order, a ``CommandRefused`` among them for what was refused.

        Raises ``LinkBroken``.
        """
        if self.closed.is_set():
            raise LinkBroken("the connection is closed")
        sent_at = time.monotonic()
        answers = [asyncio.get_running_loop().create_future() for _ in commands]
        self._pending.extend((sent_at, answer) for answer in answers)
        # Nothing is awaited before this is written, so that the order is the same on the wire.
        await self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        return [await answer for answer in answers]

    def overdue_seconds(self) -> float:
        """Return how long the oldest unanswered command has been waiting."""
        return time.monotonic() - self._pending[0][0] if self._pending else 0.0

    async def close(self) -> None:
        """Close the connection; every pending ``request`` raises ``LinkBroken``."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    self._resolve(await self._connection.read_response(disconnect_on_error=False))
                except CommandRefused as refused:
                    self._resolve(refused)
        except (RedisError, OSError):
            pass
        finally:
            self.closed.set()
            while self._pending:
                self._resolve(LinkBroken("the connection ended"))
            await self._connection.disconnect(nowait=True)

    def _resolve(self, answer: Any) -> None:
        _, future = self._pending.popleft()
        if future.done():
            return
        if isinstance(answer, LinkBroken):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _read_facts(info: bytes) -> ServerFacts:
    fields = dict(line.split(":", 1) for line in info.decode(errors="replace").split("\r\n") if ":" in line)
    # Valkey says 7.2 under Redis' name, and its own version under its own.
    version = fields.get("redis_version", "0")
    facts = ServerFacts(
        run_id=fields.get("run_id", ""),
        replication_id=fields.get("master_replid", ""),
        version=version,
        role=fields.get("role", "master"),
        eviction=fields.get("maxmemory_policy", ""),
    )
    if not facts.run_id:
        raise StoreMisconfigured("the store's INFO names no run_id: kvloop needs a Redis or Valkey server, no proxy")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST_VERSION:
        raise StoreMisconfigured(f"the store is Redis {version}: GETDEL needs 6.2 or newer, or Valkey")
    if fields.get("cluster_enabled") == "1":
        raise StoreMisconfigured("the store is a Redis Cluster: kvloop needs a single server (one primary)")
    if facts.role != "master":
        raise StoreMisconfigured("the store is a read-only replica: point KVLOOP_STORE_URL at the primary")
    return facts


def _misconfiguration(error: BaseException) -> str | None:
    """Say what a person has to change, None if the error may pass by itself."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return next((advice for cause in chain if (advice := _advice(cause)) is not None), None)


def _advice(error: BaseException) -> str | None:
    advice = None
    match error:
        case StoreMisconfigured():
            advice = str(error)
        case AuthenticationError() | AuthorizationError():
            advice = f"the store refused the login ({error}): check the user and KVLOOP_STORE_PASSWORD"
        case NoPermissionError():
            advice = f"the store's user may not do what kvloop needs ({error}): allow it {PERMISSIONS}"
        case InvalidResponse():
            advice = "what answers at KVLOOP_STORE_URL does not speak Redis' protocol: check host and port"
        case ssl.SSLCertVerificationError():
            advice = (
                f"the store's certificate is not trusted ({error.verify_message}): set KVLOOP_STORE_CA_FILE to its CA, or"
                " KVLOOP_STORE_URL to the name it is made out to"
            )
        case ssl.SSLError():
            advice = f"the store speaks no TLS that works here ({error.reason}): compare rediss:// with its port"
        case FileNotFoundError():
            advice = (
                f"KVLOOP_STORE_CA_FILE or the socket in KVLOOP_STORE_URL: no such file {error.filename or ''}".rstrip()
            )
    return advice
