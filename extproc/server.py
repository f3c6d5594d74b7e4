"""The service Envoy talks to: it performs what an ``Exchange`` asks for, and nothing else.

One ``ProcessStream`` per HTTP request. It ends in three ways: the exchange is done; Envoy closed or reset the stream (a
client left: our own call to P is dropped with it); or something was wrong, and then the stream is *aborted*: ending it
with OK while Envoy still waits for body pieces would hand a mutilated request to the worker.
"""

from __future__ import annotations

import argparse  # noqa: TC003 - the CLI contract of every command module
import asyncio
import contextlib
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import structlog
import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from extproc import wire
from extproc.errors import ConfigError, EnvoyProtocolError
from extproc.events import Call, Effect, Keep, LearnBlockSize, Receive, Release, Take
from extproc.exchange import Exchange, StreamEnded
from extproc.grpc_server import GrpcServer, Responder, Status
from extproc.log import configure_logging
from extproc.metrics import Metrics
from extproc.pool import PoolKnowledge
from extproc.receipt import Reason
from extproc.settings import GatewaySettings
from extproc.sse import EventTooLarge
from extproc.store import MemoryStore
from extproc.turn import ResponseTooLarge
from extproc.workers_client import WorkersClient

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.events import Event, LegResult
    from extproc.identity import ConversationKey
    from extproc.store import Dropped, StoredTurn

PROCESS_PATH: Final = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_RELEASES_AT_ONCE: Final = 4
_RELEASES_WAITING: Final = 10_000
_RELEASE_TIMEOUT_SECONDS: Final = 10.0
_EXPIRY_INTERVAL_SECONDS: Final = 1.0

log = structlog.get_logger()


class Gateway:
    """The state one process shares between its exchanges, and the means to perform their effects."""

    def __init__(self, settings: GatewaySettings, client: WorkersClient) -> None:
        self.settings = settings
        self.pool = PoolKnowledge()
        self.store = MemoryStore(max_conversations=settings.store_max_conversations, max_bytes=settings.store_max_bytes)
        self.metrics = Metrics(self.store)
        self._client = client
        self._releases: asyncio.Queue[Release] = asyncio.Queue(_RELEASES_WAITING)
        self._errands: set[asyncio.Task[None]] = set()
        self._warned: set[str] = set()

    def serve(self, responder: Responder) -> ProcessStream:
        """Serve one ext_proc stream (``ExternalProcessor.Process``)."""
        return ProcessStream(self, responder)

    async def call(self, call: Call) -> LegResult:
        """Perform a leg."""
        result = await self._client.call(call)
        self.metrics.leg(call, result)
        return result

    def keep(self, key: ConversationKey, turn: StoredTurn) -> None:
        """Keep a turn, and release what it displaces."""
        self._release_dropped(self.store.put(key, turn))

    def learn_block_size(self, wanted: LearnBlockSize) -> None:
        """Find out a block size in the background."""
        self._run_errand(self._learn_block_size(wanted))

    def finished(self, exchange: Exchange) -> None:
        """Count an exchange out, and say what somebody should know of it."""
        receipt = exchange.receipt
        self.metrics.finished(receipt)
        if receipt.reason is Reason.PROMPT_IDS_DIFFER:
            log.error(
                "prompt_ids_differed",
                reuse_off=self.pool.prompt_ids_differed,
                fix="P ignores kv_transfer_params.prompt_token_ids: check its vLLM version, then restart the gateway",
            )
        if receipt.captured == "loopback_host" and "loopback_host" not in self._warned:
            self._warned.add("loopback_host")
            log.warning(
                "handle_with_loopback_host",
                fix="set VLLM_NIXL_SIDE_CHANNEL_HOST on D to an address P can reach, or KVLOOP_SINGLE_HOST=true",
            )
        log.debug("request_finished", **receipt.metadata(), captured=receipt.captured)

    # --- in the background ------------------------------------------------------------------------------------------

    async def run_background(self) -> None:
        """Expire kept turns and perform releases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_for_ever())
            for _ in range(_RELEASES_AT_ONCE):
                tasks.create_task(self._release_for_ever())

    async def release_everything(self) -> None:
        """Queue a release for every kept turn, and wait until the queue is empty."""
        self._release_dropped(self.store.drain())
        await self._releases.join()

    def _release_dropped(self, dropped: list[Dropped]) -> None:
        for drop in dropped:
            if drop.reason != "engine_gone":
                self.release(Release(drop.turn.handle, drop.turn.model, drop.reason))

    def release(self, release: Release) -> None:
        """Have D free a handle's blocks, in the background."""
        try:
            self._releases.put_nowait(release)
        except asyncio.QueueFull:
            self.metrics.released(release.reason, "dropped")

    async def _release_for_ever(self) -> None:
        while True:
            release = await self._releases.get()
            try:
                freed = await self._client.release(release, _RELEASE_TIMEOUT_SECONDS)
            except Exception:
                # One bad release must not end expiry and all other releases with it.
                log.exception("release_failed")
                freed = False
            finally:
                self._releases.task_done()
            self.metrics.released(release.reason, "freed" if freed else "failed")

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_SECONDS)
            self._release_dropped(self.store.expire(time.monotonic()))

    def _run_errand(self, errand: Any) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _learn_block_size(self, wanted: LearnBlockSize) -> None:
        tokens = await self._client.block_size_tokens(wanted.upstream_address)
        if tokens is None:
            if wanted.engine_id not in self._warned:
                self._warned.add(wanted.engine_id)
                log.warning(
                    "block_size_unknown",
                    worker=wanted.upstream_address,
                    fix="set KVLOOP_DECODE_BLOCK_SIZE_TOKENS; until then handles of this worker are not used",
                )
            return
        self.pool.learn_block_size(wanted.engine_id, tokens)


class ProcessStream:
    """One exchange, driven straight from the messages that arrive: only our own calls to P have to be waited for."""

    def __init__(self, gateway: Gateway, responder: Responder) -> None:
        self._gateway = gateway
        self._responder = responder
        self._exchange = Exchange(gateway.settings, gateway.pool)
        self._run: Generator[Effect, Any, None] | None = self._exchange.run()
        self._waiting: deque[bytes] = deque()
        self._is_ended = False
        self._is_busy = False
        self._call: asyncio.Task[None] | None = None
        gateway.metrics.began()
        self._advance()

    def message_received(self, message: bytes) -> None:
        """Take Envoy's next message."""
        self._waiting.append(message)
        self._receive()

    def half_closed(self) -> None:
        """Take note that Envoy sends no more."""
        self._is_ended = True
        self._receive()

    def writable(self) -> None:
        """Go on after flow control held an answer back."""
        if self._is_busy and self._call is None:
            self._is_busy = False
            self._advance()

    def reset(self) -> None:
        """Drop everything: a client left, or Envoy is gone. Our own call to P is dropped with it."""
        if self._call is not None:
            self._call.cancel()
        self._abandon()

    def _receive(self) -> None:
        """Give the exchange the message it is waiting for, if it is."""
        if not self._is_busy:
            self._advance(receives=True)

    def _next_event(self) -> Event | None:
        """Return the next message as an event, the stream's end after the last, None while there is neither."""
        now = time.monotonic()
        if not self._waiting:
            return wire.ended(now) if self._is_ended else None
        message = self._waiting.popleft()
        self._responder.consumed(message)
        return wire.read(message, now)

    def _advance(self, result: Any = None, *, receives: bool = False) -> None:
        """Let the exchange go on with ``result``, or with the message it waits for, until it has to wait again."""
        if self._run is None:
            return
        try:
            is_done = True
            if receives:
                is_done, result = self._perform(Receive())
            while is_done:
                is_done, result = self._perform(self._run.send(result))
        except StopIteration:
            self._end(Status.OK)
        except (EnvoyProtocolError, EventTooLarge, ResponseTooLarge) as error:
            self._abort(error)
        except Exception as error:
            log.exception("stream_failed")
            self._abandon()
            self._responder.finish(Status.INTERNAL, type(error).__name__)

    def _perform(self, effect: Effect) -> tuple[bool, Any]:
        """Return whether the effect is done, and its result; if not, whatever it waits for goes on from here."""
        match effect:
            case Receive():
                event = self._next_event()
                return event is not None, event
            case Call():
                self._is_busy = True
                self._call = asyncio.get_running_loop().create_task(self._perform_call(effect))
                return False, None
            case Take(key):
                return True, self._gateway.store.take(key)
            case Keep(key, turn):
                self._gateway.keep(key, turn)
            case Release():
                self._gateway.release(effect)
            case LearnBlockSize():
                self._gateway.learn_block_size(effect)
            case answer:
                for message in wire.write(answer):
                    # In order, whatever flow control says: only the next effect waits for it.
                    self._is_busy = not self._responder.send(message)
                return not self._is_busy, None
        return True, None

    async def _perform_call(self, call: Call) -> None:
        result = await self._gateway.call(call)
        self._call = None
        self._is_busy = False
        self._advance(result)

    def _abort(self, error: Exception) -> None:
        log.warning("stream_aborted", error=type(error).__name__, detail=str(error))
        self._end(Status.INTERNAL, type(error).__name__)

    def _abandon(self) -> None:
        """Let the exchange clean up after itself; all it may still ask for is a release."""
        run, self._run = self._run, None
        if run is None:
            return
        with contextlib.suppress(StopIteration, StreamEnded):
            effect = run.throw(StreamEnded())
            while True:
                if isinstance(effect, Release):
                    self._gateway.release(effect)
                effect = run.send(None)
        self._gateway.finished(self._exchange)

    def _end(self, status: int, text: str = "") -> None:
        self._run = None
        self._gateway.finished(self._exchange)
        self._responder.finish(status, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the service is configured by environment variables alone."""
    parser.epilog = "Every setting is a KVLOOP_* environment variable; see docs/settings.md."


def main(_: argparse.Namespace) -> int:
    """Run the service; returns the exit status."""
    settings = GatewaySettings()
    configure_logging(settings.log_level)
    uvloop.run(serve(settings))
    return 0


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain: finish running streams, release kept handles. Raises ConfigError."""
    secret = settings.worker_secret.get_secret_value() if settings.worker_secret else None
    api_key = settings.worker_api_key.get_secret_value() if settings.worker_api_key else None
    async with WorkersClient(settings.prefill_url, secret=secret, api_key=api_key) as client:
        gateway = Gateway(settings, client)
        server = await _start_grpc(gateway, settings)
        admin = await _start_admin(gateway, settings)
        background = asyncio.create_task(gateway.run_background())
        log.info("serving", listen=settings.listen, admin=settings.admin_listen, prefill=settings.prefill_url)
        try:
            await _stop_signal()
            log.info("draining", seconds=settings.drain_seconds)
            await server.stop(settings.drain_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                    await gateway.release_everything()
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await admin.cleanup()
            log.info("stopped")


async def _start_grpc(gateway: Gateway, settings: GatewaySettings) -> GrpcServer:
    # Envoy sends body pieces of up to its connection buffer.
    server = GrpcServer(
        {PROCESS_PATH: gateway.serve}, max_message_bytes=settings.request_max_bytes + settings.response_max_bytes
    )
    host, _, port = settings.listen.rpartition(":")
    try:
        await server.start(host.strip("[]"), int(port))
    except OSError:
        raise ConfigError(
            f"cannot listen on {settings.listen}: in use or not ours; set KVLOOP_LISTEN to a free address"
        ) from None
    return server


async def _start_admin(gateway: Gateway, settings: GatewaySettings) -> web.AppRunner:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(gateway.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = settings.admin_listen.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {settings.admin_listen}: {error.strerror}; set KVLOOP_ADMIN_LISTEN to a free address"
        ) from None
    return runner


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
