"""``kvloop serve``: the ext_proc service from start to drained end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal

import structlog
import uvloop

from extproc.admin import start_admin
from extproc.errors import ConfigError
from extproc.garbage import keep_collections_short
from extproc.gateway import RELEASE_TIMEOUT_SECONDS, Gateway
from extproc.grpc_server import GrpcServer
from extproc.log import configure_logging
from extproc.processes import supervise, take_connections
from extproc.readiness import Readiness
from extproc.settings import GatewaySettings, unknown_variables
from extproc.stream import PROCESS_PATH, serve_process
from extproc.tls import prefill_context, server_context
from extproc.tracing import start_tracing
from extproc.workers_client import WorkersClient

log = structlog.get_logger()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many processes to run; all else is configured by environment variables."""
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="event loops on one port; more than one need KVLOOP_STORE_URL",
    )
    # How a parent starts its processes.
    parser.add_argument("--control-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--admin-socket", help=argparse.SUPPRESS)
    parser.epilog = "Every setting is a KVLOOP_* environment variable; see docs/settings.md."


def main(args: argparse.Namespace) -> int:
    """Run the service; returns the exit status."""
    settings = GatewaySettings()
    configure_logging(settings.log_level)
    if args.control_fd is not None:
        uvloop.run(serve(settings, args.control_fd, args.admin_socket))
        return 0
    for line in unknown_variables(os.environ):
        log.warning("unknown_variable", detail=line)
    if settings.worker_secret is None:
        fix = "set KVLOOP_WORKER_SECRET to one secret here and on every worker"
        log.warning("no_worker_secret", effect="whoever reaches a worker may have it read others' KV", fix=fix)
    if args.processes < 1:
        raise ConfigError(f"--processes {args.processes}: at least one process has to serve")
    if args.processes > 1:
        return uvloop.run(supervise(settings, args.processes))
    uvloop.run(serve(settings))
    return 0


async def serve(settings: GatewaySettings, control_fd: int | None = None, admin_socket: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain: finish running streams, release kept handles. Raises ConfigError.

    ``control_fd`` is where a parent process hands connections over; without one this process listens by itself.
    """
    secret = settings.worker_secret.get_secret_value() if settings.worker_secret else None
    api_key = settings.worker_api_key.get_secret_value() if settings.worker_api_key else None
    tracing = start_tracing(os.environ)
    readiness = Readiness(settings.prefill_url)
    client = WorkersClient(settings.prefill_url, secret=secret, api_key=api_key, tls=prefill_context(settings))
    async with client:
        gateway = Gateway(settings, client, tracing)
        if gateway.shared_store is not None:
            await gateway.shared_store.open()
        server = await _start_grpc(gateway, settings, listens=control_fd is None)
        server.is_serving = False  # not yet: see ``readiness``
        admin = await start_admin(gateway, readiness, settings, socket_path=admin_socket)
        background = asyncio.create_task(_run_background(gateway, server, readiness))
        if control_fd is not None:
            context = server_context(settings)
            control = take_connections(control_fd, lambda connection: server.accept(connection, ssl=context))
        log.info("serving", listen=settings.listen, admin=settings.admin_listen, prefill=settings.prefill_url)
        try:
            await _stop_signal()
            log.info("draining", seconds=settings.drain_seconds)
            readiness.is_draining = True
            server.is_serving = False
            # Envoy has to notice first: what it sends here until then is still served.
            delay = min(settings.drain_delay_seconds, settings.drain_seconds)
            await asyncio.sleep(delay)
            await server.stop(settings.drain_seconds - delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_SECONDS):
                    await gateway.release_everything()
        finally:
            if control_fd is not None:
                asyncio.get_running_loop().remove_reader(control)
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await admin.cleanup()
            if tracing is not None:
                await tracing.stop()
            log.info("stopped")


async def _run_background(gateway: Gateway, server: GrpcServer, readiness: Readiness) -> None:
    def start_serving() -> None:
        server.is_serving = not readiness.is_draining

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(gateway.run_background())
        tasks.create_task(readiness.watch(start_serving))
        tasks.create_task(keep_collections_short())


async def _start_grpc(gateway: Gateway, settings: GatewaySettings, *, listens: bool) -> GrpcServer:
    # Envoy sends body pieces of up to its connection buffer.
    server = GrpcServer(
        {PROCESS_PATH: lambda responder: serve_process(gateway, responder)},
        max_message_bytes=settings.request_max_bytes + settings.response_max_bytes,
    )
    context = server_context(settings)
    if not listens:
        return server
    host, _, port = settings.listen.rpartition(":")
    try:
        await server.start(host.strip("[]"), int(port), ssl=context)
    except OSError:
        raise ConfigError(
            f"cannot listen on {settings.listen}: in use or not ours; set KVLOOP_LISTEN to a free address"
        ) from None
    return server


async def _stop_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
