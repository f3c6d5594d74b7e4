"""The gRPC service Envoy talks to: it performs what an ``Exchange`` asks for, and nothing else.

One coroutine per HTTP request. It ends in three ways: the exchange is done; Envoy closed or cancelled the stream (a client
left: our own call to P is dropped with it); or something was wrong, and then the stream is *aborted*: ending it with OK
while Envoy still waits for body pieces would hand a mutilated request to the worker.
"""

from __future__ import annotations

import argparse  # noqa: TC003 - the CLI contract of every command module
import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
import uvloop
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from extproc import wire
from extproc.errors import ConfigError, EnvoyProtocolError
from extproc.events import Call, Effect, Keep, LearnBlockSize, Receive, Release, Take
from extproc.exchange import Exchange, StreamEnded
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

    from extproc.store import Dropped

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
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

    async def process(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Serve one ext_proc stream (``ExternalProcessor.Process``, raw message bytes both ways)."""
        exchange = Exchange(self.settings, self.pool)
        run = exchange.run()
        self.metrics.began()
        try:
            await self._drive(run, context)
        except asyncio.CancelledError:
            self._abandon(run)
            raise
        except (EnvoyProtocolError, EventTooLarge, ResponseTooLarge) as error:
            log.warning("stream_aborted", error=type(error).__name__, detail=str(error))
            await context.abort(grpc.StatusCode.INTERNAL, type(error).__name__)
        except Exception as error:
            self._abandon(run)
            log.exception("stream_failed")
            await context.abort(grpc.StatusCode.INTERNAL, type(error).__name__)
        finally:
            self._finish(exchange)

    async def _drive(self, run: Generator[Effect, Any, None], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        with contextlib.suppress(StopIteration):
            effect = next(run)
            while True:
                effect = run.send(await self._perform(effect, context))

    async def _perform(self, effect: Effect, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
        match effect:
            case Receive():
                message = await context.read()
                now = time.monotonic()
                return wire.ended(now) if message is grpc.aio.EOF else wire.read(message, now)
            case Call():
                result = await self._client.call(effect)
                self.metrics.leg(effect, result)
                return result
            case Take(key):
                return self.store.take(key)
            case Keep(key, turn):
                self._release_dropped(self.store.put(key, turn))
            case Release():
                self._enqueue(effect)
            case LearnBlockSize():
                self._run_errand(self._learn_block_size(effect))
            case answer:
                for message in wire.write(answer):
                    await context.write(message)
        return None

    def _abandon(self, run: Generator[Effect, Any, None]) -> None:
        """Let the exchange clean up after itself; all it may still ask for is a release."""
        with contextlib.suppress(StopIteration, StreamEnded):
            effect = run.throw(StreamEnded())
            while True:
                if isinstance(effect, Release):
                    self._enqueue(effect)
                effect = run.send(None)

    def _finish(self, exchange: Exchange) -> None:
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
                self._enqueue(Release(drop.turn.handle, drop.turn.model, drop.reason))

    def _enqueue(self, release: Release) -> None:
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
        server, health_servicer = _grpc_server(gateway, settings)
        admin = await _start_admin(gateway, settings)
        background = asyncio.create_task(gateway.run_background())
        await server.start()
        await _set_health(health_servicer, serving=True)
        log.info("serving", listen=settings.listen, admin=settings.admin_listen, prefill=settings.prefill_url)
        try:
            await _stop_signal()
            log.info("draining", seconds=settings.drain_seconds)
            await _set_health(health_servicer, serving=False)
            await server.stop(settings.drain_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                    await gateway.release_everything()
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await admin.cleanup()
            log.info("stopped")


def _grpc_server(gateway: Gateway, settings: GatewaySettings) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    server = grpc.aio.server(
        options=(
            # Envoy sends body pieces of up to its connection buffer; gRPC's default of 4 MiB would refuse them.
            ("grpc.max_receive_message_length", settings.request_max_bytes + settings.response_max_bytes),
            ("grpc.max_send_message_length", -1),
            # Envoy's keepalive pings come without calls, too.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        )
    )
    # Raw bytes on purpose: wire.py parses, and constant answers are serialised once.
    handler = grpc.stream_stream_rpc_method_handler(gateway.process)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    try:
        bound = server.add_insecure_port(settings.listen)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(
            f"cannot listen on {settings.listen}: in use or not ours; set KVLOOP_LISTEN to a free address"
        )
    return server, health_servicer


async def _set_health(servicer: health.aio.HealthServicer, *, serving: bool) -> None:
    response = health_pb2.HealthCheckResponse
    status = response.SERVING if serving else response.NOT_SERVING
    for service in ("", SERVICE):
        await servicer.set(service, status)


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
