"""A P/D proxy of the published multi-turn shape (vLLM's ``disagg_proxy_multiturn.py``), as small as it can be.

It keeps the transfer parameters of D's last message by ``conversation_id``, attaches them to the conversation's next
prefill leg, and hands P's to D with the host it reaches P by. It compares nothing, and forwards neither the conversation's
id nor a header.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

NOTHING_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    """Return the proxy."""
    kept: dict[str, dict[str, Any]] = {}
    client = httpx.AsyncClient(timeout=None, trust_env=False)  # noqa: S113 - a prompt may take its time
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        body = await request.json()
        conversation = body.pop("conversation_id", "")
        handle = kept.pop(conversation, None)
        params = NOTHING_REMOTE if handle is None else {**handle, "do_remote_decode": True, "do_remote_prefill": False}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
        prefilled = await client.post(f"{prefill_url}{request.url.path}", json=first)
        if not prefilled.is_success:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        params = {**prefilled.json()["kv_transfer_params"], "remote_host": httpx.URL(prefill_url).host}
        second = client.build_request(
            "POST", f"{decode_url}{request.url.path}", json={**body, "stream": True, "kv_transfer_params": params}
        )
        answer = await client.send(second, stream=True)

        async def lines() -> AsyncIterator[str]:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    handle = json.loads(line[6:]).get("kv_transfer_params")
                    if handle and conversation:
                        kept[conversation] = {**handle, "remote_host": httpx.URL(decode_url).host}
                yield line + "\n"

        receipt = {name: value for name, value in answer.headers.items() if name == "x-kvloop-receipt"}
        return StreamingResponse(lines(), answer.status_code, headers=receipt, media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(*sys.argv[2:4]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
