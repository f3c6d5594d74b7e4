"""The admin port: metrics, liveness, readiness, a look inside and letting go, for those who run the gateway."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from extproc.admin_release import release_routes
from extproc.errors import ConfigError

if TYPE_CHECKING:
    from extproc.gateway import Gateway
    from extproc.readiness import Readiness
    from extproc.settings import GatewaySettings

_SHOWN: Final = 50
_MOST_SHOWN: Final = 1000


async def start_admin(
    gateway: Gateway, readiness: Readiness, settings: GatewaySettings, *, socket_path: str | None = None
) -> web.AppRunner:
    """Serve metrics, liveness, readiness, ``/debug/state`` and releases; raises ``ConfigError``. Clean the runner up to stop."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(gateway.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        obstacle = readiness.obstacle()
        return web.Response(text=f"{obstacle or 'ok'}\n", status=503 if obstacle else 200)

    async def state(request: web.Request) -> web.Response:
        if settings.debug_state == "loopback" and not is_loopback(request.remote):
            raise web.HTTPForbidden(text="Only answered on this machine; KVLOOP_DEBUG_STATE=anyone changes that.\n")
        wanted = request.query.get("limit", "")
        limit = min(int(wanted), _MOST_SHOWN) if wanted.isdecimal() and len(wanted) < 10 else _SHOWN  # noqa: PLR2004
        return web.Response(body=orjson.dumps(gateway.state(limit)), content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    if settings.debug_state != "off":
        app.add_routes([web.get("/debug/state", state)])
    app.add_routes(release_routes(gateway, settings))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = settings.admin_listen.rpartition(":")
    try:
        if socket_path is None:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        else:
            await web.UnixSite(runner, socket_path).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {settings.admin_listen}: {error.strerror}; set KVLOOP_ADMIN_LISTEN to a free address"
        ) from None
    return runner


def is_loopback(peer: str | None) -> bool:
    """Whether a request came from this machine. On a Unix socket there is no address: only the parent process knows it."""
    if not peer:
        return peer == ""
    address = ipaddress.ip_address(peer)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
