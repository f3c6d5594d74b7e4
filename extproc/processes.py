"""``kvloop serve --processes N``: several processes on one port, each with its own event loop, all with one shared store.

The parent listens and hands each connection to the next process in turn: Envoy opens few connections and keeps them, so
leaving the choice to the kernel could leave processes without any. A process that ends is started again; a parent that ends
takes its processes with it, since each sees the end of its control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
import structlog
from aiohttp import web

from extproc.admin import is_loopback
from extproc.errors import ConfigError
from extproc.metrics_sum import MetricsSum

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.settings import GatewaySettings

READY: Final = b"r"
_CONNECTION: Final = b"c"
_MISUSE: Final = 2
_ACCEPT_AGAIN_SECONDS: Final = 0.1
_RESTART_SECONDS: Final = (0.1, 0.5, 2.0, 5.0)
_ASK_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)

log = structlog.get_logger()


# --- the parent ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """One process: where its admin port listens, the parent's end of its control socket, and whether it serves."""

    number: int
    admin: Path
    control: socket.socket | None = None
    process: asyncio.subprocess.Process | None = None
    is_ready: bool = False
    metrics: str = ""


@dataclass(slots=True)
class Parent:
    """Listens, hands connections on, watches over the processes and speaks for them on the admin port."""

    settings: GatewaySettings
    children: list[Child]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    misused: bool = False
    counted: MetricsSum = field(default_factory=MetricsSum)

    async def run(self) -> int:
        """Serve until told to stop; returns the exit status. Raises ``ConfigError``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        with _listen(self.settings.listen) as listener:
            admin = await self._start_admin()
            watches = [asyncio.create_task(self._watch(child)) for child in self.children]
            accepting = asyncio.create_task(self._accept(listener))
            log.info("supervising", processes=len(self.children), listen=self.settings.listen)
            try:
                await self.stopping.wait()
            finally:
                accepting.cancel()
                listener.close()
                for child in self.children:
                    _terminate(child)
                await asyncio.gather(*watches, accepting, return_exceptions=True)
                await admin.cleanup()
        return _MISUSE if self.misused else 0

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        turns = cycle(self.children)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Too many open files, or a peer that has left already: no reason to take no more connections for ever.
                log.warning("accept_failed", error=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            with connection:
                for child in islice(turns, len(self.children)):
                    if _hand_over(child, connection):
                        break

    async def _watch(self, child: Child) -> None:
        """Start a process, and start it again whenever it ends."""
        for failures in range(sys.maxsize):
            status = await self._run_child(child)
            if self.stopping.is_set():
                return
            if status == _MISUSE:
                # It has said what is wrong in one line, and would say so again.
                self.misused = True
                self.stopping.set()
                return
            log.error("process_ended", number=child.number, status=status)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESTART_SECONDS[min(failures, len(_RESTART_SECONDS) - 1)]):
                    await self.stopping.wait()

    async def _run_child(self, child: Child) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003 - the socket's own interface
        with ours, theirs:
            command = ["serve", "--control-fd", str(theirs.fileno()), "--admin-socket", str(child.admin)]
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "extproc.cli", *command),
                pass_fds=[theirs.fileno()],
                # A terminal's Ctrl-C reaches the parent alone, which then stops all in order.
                start_new_session=True,
            )
            theirs.close()
            child.control = ours
            with contextlib.suppress(OSError):
                child.is_ready = await asyncio.get_running_loop().sock_recv(ours, 1) == READY
            if self.stopping.is_set():
                _terminate(child)
            status = await child.process.wait()
            child.is_ready, child.control = False, None
        self.counted.add_ended(child.metrics)
        child.metrics = ""
        return status

    # --- the admin port -----------------------------------------------------------------------------------------------

    async def _start_admin(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._tell_metrics), web.get("/healthz", self._tell_health)])
        app.add_routes([web.get("/readyz", self._tell_readiness)])
        if self.settings.debug_state != "off":
            app.add_routes([web.get("/debug/state", self._tell_state)])
        app.add_routes([web.delete("/{path:.*}", self._delete)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, _, port = self.settings.admin_listen.rpartition(":")
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self.settings.admin_listen}: {error.strerror};"
                " set KVLOOP_ADMIN_LISTEN to a free address"
            ) from None
        return runner

    async def _tell_metrics(self, _: web.Request) -> web.Response:
        async def ask(child: Child) -> None:
            status, body = await _ask(child, "GET", "/metrics")
            if status == web.HTTPOk.status_code:
                child.metrics = body.decode()

        await asyncio.gather(*(ask(child) for child in self.children if child.is_ready))
        body = self.counted.exposition([child.metrics for child in self.children if child.metrics])
        return web.Response(body=body, content_type="text/plain", charset="utf-8")

    async def _tell_health(self, _: web.Request) -> web.Response:
        ready = sum(child.is_ready for child in self.children)
        return web.Response(text=f"{ready} of {len(self.children)} processes\n", status=200 if ready else 503)

    async def _tell_readiness(self, request: web.Request) -> web.Response:
        answers = await self._ask_all(request)
        body = next((body for status, body in answers if status == web.HTTPOk.status_code), None)
        if body is None:
            body = answers[0][1] if answers else b"no process\n"
            return web.Response(body=body, status=503)
        return web.Response(body=body)

    async def _tell_state(self, request: web.Request) -> web.Response:
        if self.settings.debug_state == "loopback" and not is_loopback(request.remote):
            raise web.HTTPForbidden(text="Only answered on this machine; KVLOOP_DEBUG_STATE=anyone changes that.\n")
        return _together(await self._ask_all(request))

    async def _delete(self, request: web.Request) -> web.Response:
        return _together(await self._ask_all(request))

    async def _ask_all(self, request: web.Request) -> list[tuple[int, bytes]]:
        ready = [child for child in self.children if child.is_ready]
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        return await asyncio.gather(*(_ask(child, request.method, request.path_qs, headers) for child in ready))


async def supervise(settings: GatewaySettings, count: int) -> int:
    """Run ``count`` processes; returns the exit status. Raises ``ConfigError``."""
    if settings.store_url is None:
        raise ConfigError(
            f"--processes {count} needs a store the processes share: set KVLOOP_STORE_URL (docs/scaling-out.md)"
        )
    with tempfile.TemporaryDirectory(prefix="kvloop-") as directory:
        children = [Child(number, Path(directory) / f"admin-{number}") for number in range(count)]
        return await Parent(settings, children).run()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError:
        raise ConfigError(
            f"cannot listen on {address}: in use or not ours; set KVLOOP_LISTEN to a free address"
        ) from None
    listener.setblocking(False)  # noqa: FBT003 - the socket's own interface
    return listener


def _hand_over(child: Child, connection: socket.socket) -> bool:
    if child.control is None or not child.is_ready:
        return False
    try:
        socket.send_fds(child.control, [_CONNECTION], [connection.fileno()])
    except OSError:
        return False  # it is ending, or takes nothing more
    return True


def _terminate(child: Child) -> None:
    if child.process is not None:
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()


async def _ask(child: Child, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connector = aiohttp.UnixConnector(str(child.admin))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_ASK_TIMEOUT) as session,
            session.request(method, f"http://process{path}", headers=headers) as response,
        ):
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return 0, b""


def _together(answers: list[tuple[int, bytes]]) -> web.Response:
    """Make one answer of the processes' answers; an error only if all gave one."""
    good = [orjson.loads(body) for status, body in answers if status == web.HTTPOk.status_code]
    if not good:
        status, body = max(answers, default=(503, b"no process\n"))
        return web.Response(status=status or 503, body=body)
    together = good[0]
    for more in good[1:]:
        together = combined(together, more)
    return web.Response(body=orjson.dumps(together), content_type="application/json")


def combined(one: Any, other: Any) -> Any:
    """Combine two processes' words on the same thing: numbers add up, lists are joined, either truth is true."""
    match one, other:
        case bool(), bool():
            return one or other
        case int() | float(), int() | float():
            return one + other
        case list(), list():
            return [*one, *other]
        case dict(), dict():
            return {**one, **other, **{key: combined(one[key], other[key]) for key in one.keys() & other.keys()}}
        case _:
            return one


# --- the process ----------------------------------------------------------------------------------------------------------


def take_connections(control_fd: int, accept: Callable[[socket.socket], None]) -> socket.socket:
    """Say that this process serves, and ``accept`` every connection the parent hands over; stop when the parent ends."""
    control = socket.socket(fileno=control_fd)
    control.setblocking(False)  # noqa: FBT003 - the socket's own interface
    loop = asyncio.get_running_loop()

    def receive() -> None:
        try:
            message, fds, _, _ = socket.recv_fds(control, 64, 64)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        for fd in fds:
            accept(socket.socket(fileno=fd))
        if not message:
            loop.remove_reader(control)
            os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(control, receive)
    control.send(READY)
    return control
