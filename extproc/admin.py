"""The admin port: metrics and liveness, for those who run the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from extproc.gateway import Gateway
    from extproc.settings import GatewaySettings


async def start_admin(gateway: Gateway, settings: GatewaySettings) -> web.AppRunner:
    """Serve ``/metrics`` and ``/healthz``; raises ``ConfigError``. Clean the runner up to stop."""

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
