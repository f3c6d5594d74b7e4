"""Our own HTTP client, against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from structlog.testing import capture_logs
from world import handle_params

from extproc.events import Call, Leg, Release
from extproc.handle import read_publication
from extproc.worker_metrics import EngineLoad
from extproc.workers_client import WorkersClient


def serve(handler: Any, test: Any) -> Any:
    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with WorkersClient(f"http://localhost:{port}", secret="the-secret", api_key="the-key") as client:
                return await test(client, port)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def call(headers: tuple[tuple[str, str], ...] = ()) -> Call:
    return Call(Leg.PREFILL, "/v1/chat/completions", headers, b"{}", 5.0)


def test_a_workers_cookie_for_one_client_is_not_sent_with_another_clients_leg() -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("cookie"))
        response = web.Response(text="{}")
        response.set_cookie("session", "alice")
        return response

    async def test(client: WorkersClient, _: int) -> None:
        await client.call(call())
        await client.call(call((("cookie", "mine=1"),)))

    serve(handler, test)
    assert seen == [None, "mine=1"]


def test_a_redirect_is_an_answer_and_takes_the_secret_nowhere() -> None:
    seen: list[tuple[str, str | None]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("x-kvloop-secret")))
        return web.Response(status=307, headers={"location": f"http://127.0.0.1:{request.url.port}/elsewhere"})

    async def test(client: WorkersClient, _: int) -> int:
        return (await client.call(call())).status

    assert serve(handler, test) == 307
    assert [path for path, _ in seen] == ["/v1/chat/completions"]


def test_a_release_carries_secret_api_key_and_no_tokens() -> None:
    seen: list[tuple[Any, Any, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        headers = request.headers
        seen.append((headers.get("x-kvloop-secret"), headers.get("authorization"), await request.json()))
        return web.Response(text="{}")

    async def test(client: WorkersClient, _: int) -> bool:
        handle = read_publication(json.dumps(handle_params(64)).encode()).handle
        return await client.release(Release(handle, "m", "expired"), 5.0)

    assert serve(handler, test) is True
    ((secret, authorization, body),) = seen
    assert (secret, authorization) == ("the-secret", "Bearer the-key")
    assert body["kv_transfer_params"]["remote_num_tokens"] == 0
    assert body["prompt"] == [0]


def test_a_worker_that_does_not_answer_in_time_is_a_timeout_and_one_that_is_gone_unreachable() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async def test(client: WorkersClient, _: int) -> tuple[str, int]:
        result = await client.call(Call(Leg.PREFILL, "/v1/chat/completions", (), b"{}", 0.1))
        return result.error, result.status

    async def gone() -> str:
        async with WorkersClient("http://127.0.0.1:1") as client:
            return (await client.call(call())).error

    assert serve(handler, test) == ("timeout", 0)
    assert asyncio.run(gone()) == "unreachable"


def test_the_block_size_is_read_from_vllm_s_metrics() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text='# HELP\nvllm:cache_config_info{a="1",block_size="32",engine="0"} 1.0\n')

    async def test(client: WorkersClient, port: int) -> tuple[EngineLoad | None, EngineLoad | None]:
        return await client.engine_load(f"127.0.0.1:{port}"), await client.engine_load("127.0.0.1:1")

    assert serve(handler, test) == (EngineLoad(32, None, 0.0, 0), None)


def test_the_guard_s_refusal_is_no_worker_s_answer_and_is_told_once_with_its_fix() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "only the gateway", "code": "kvloop_secret"}}, status=403)

    async def test(client: WorkersClient, _: int) -> list[tuple[int, bytes, str]]:
        results = [await client.call(call()) for _ in range(2)]
        return [(result.status, result.body, result.error) for result in results]

    with capture_logs() as logs:
        assert serve(handler, test) == [(0, b"", "guard_refused")] * 2
    (told,) = logs
    assert (told["log_level"], told["event"]) == ("warning", "guard_refused")
    assert "KVLOOP_WORKER_SECRET" in told["fix"]


def test_a_worker_s_own_403_is_its_answer() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "not yours", "code": 403}}, status=403)

    async def test(client: WorkersClient, _: int) -> tuple[int, str]:
        result = await client.call(call())
        return result.status, result.error

    assert serve(handler, test) == (403, "")
