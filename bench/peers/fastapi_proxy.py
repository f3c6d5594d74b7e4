"""A P/D proxy of the usual shape: FastAPI in front, httpx behind. Run in its own environment by ``kvloop bench peers``.

It does what such proxies do, and no more: prefill with one token, hand P's transfer parameters to D, pass D's stream on.
"""

import argparse
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

COLD_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def make_app(prefill: list[str], decode: list[str]) -> FastAPI:
    """Return the proxy; workers take turns."""
    clients: dict[str, httpx.AsyncClient] = {}
    prefill_urls, decode_urls = itertools.cycle(prefill), itertools.cycle(decode)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        for url in (*prefill, *decode):
            clients[url] = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)  # noqa: S113
        yield
        for client in clients.values():
            await client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def serve(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        path = request.url.path
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": COLD_PREFILL}
        first.pop("stream_options", None)
        prefilled = await clients[next(prefill_urls)].post(path, json=first)
        if not prefilled.is_success:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        body["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
        client = clients[next(decode_urls)]
        answer = await client.send(client.build_request("POST", path, json=body), stream=True)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_bytes():
                    yield chunk
            finally:
                await answer.aclose()

        return StreamingResponse(chunks(), answer.status_code, media_type=answer.headers.get("content-type"))

    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_api_route(path, serve, methods=["POST"], response_model=None)
    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    args = parser.parse_args()
    app = make_app(args.prefill, args.decode)
    # uvloop and httptools as its own documentation advises, one process, nothing logged per request.
    uvicorn.run(
        app, host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )


if __name__ == "__main__":
    main()
