"""The admin port's part of letting go: end a conversation, or have a decode engine let go of before it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from extproc.identity import ConversationKey, conversation_key

if TYPE_CHECKING:
    from extproc.gateway import Gateway
    from extproc.settings import GatewaySettings


def release_routes(gateway: Gateway, settings: GatewaySettings) -> list[web.RouteDef]:
    """Return ``DELETE /conversations/{id}`` and ``DELETE /engines/{name}``, as docs/retention.md describes them."""

    async def end_conversation(request: web.Request) -> web.Response:
        key = _named_conversation(request, settings.tenant_header)
        released = await gateway.end_conversation(key)
        if not isinstance(released, bool):
            raise web.HTTPServiceUnavailable(text=f"not known: {released}\n")
        return web.json_response({"conversation": str(key), "released": released})

    async def drain_engine(request: web.Request) -> web.Response:
        return web.json_response({"released": gateway.drain_engine(request.match_info["name"])})

    return [web.delete("/conversations/{id}", end_conversation), web.delete("/engines/{name}", drain_engine)]


def _named_conversation(request: web.Request, tenant_header: str) -> ConversationKey:
    """Return the key a request names: by the client's id if it tells the model, else by the hash the access log shows."""
    name, model = request.match_info["id"], request.query.get("model")
    if model is not None:
        tenant = request.headers.get(tenant_header, "")
        return conversation_key(tenant, model, request.query.get("cache_salt", ""), name)
    key = ConversationKey.parse(name)
    if key is None:
        raise web.HTTPBadRequest(
            text="give ?model=NAME with the client's conversation id, or the 32 hex digits the access log calls"
            " conversation\n"
        )
    return key
