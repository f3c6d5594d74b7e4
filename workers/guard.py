"""Refuse requests that carry KV transfer parameters without the gateway's shared secret.

Whoever may set ``kv_transfer_params`` makes a worker connect to a host of their choice and read another conversation's
blocks (vllm-project/vllm#47843). The gateway strips them from clients; this is the second lock, on the worker itself,
for requests that come round the gateway.

Install with vLLM's ``--middleware workers.guard.SecretGuard``. The secret comes from ``KVLOOP_WORKER_SECRET``; without
it the guard lets everything pass. vLLM adds ``--middleware`` classes last, so the guard is the outermost layer and sees
every path. Rules that must stay true:

* A request with the right secret is never read here: not one byte is buffered.
* Any other body reaches the application exactly as it was received, or not at all.
* Where the body cannot be understood but mentions the names, it is refused.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

from extproc.headers import GUARD_CODE, SECRET

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH: Final = "workers.guard.SecretGuard"
"""What to give to vLLM's ``--middleware``."""

KV_CONFIG_PATH: Final = "/kvloop/kv-config"
"""Where whoever knows the secret is told how this worker transfers KV."""

SECRET_VARIABLE: Final = "KVLOOP_WORKER_SECRET"  # noqa: S105 (a variable's name)
MAX_BYTES_VARIABLE: Final = "KVLOOP_GUARD_MAX_BYTES"
DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
"""Twice the gateway's own limit. A body has to be held to be looked at, so it needs one."""

FORBIDDEN_KEYS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
USER_DATA_FIELDS: Final = frozenset(
    {
        "messages",
        "tools",
        "functions",
        "input",
        "documents",
        "response_format",
        "structured_outputs",
        "text",
        "chat_template_kwargs",
        "metadata",
    }
)
"""Top-level fields whose inside is the user's own data (a tool may well have a parameter of that name) and is never
merged into sampling parameters. Everywhere else the keys are refused at any depth: ``vllm_xargs`` and
``sampling_params.extra_args`` are the places that count today, but a guard should not need to know tomorrow's."""

_MENTION: Final = re.compile("[ke][vc]_transfer_params")
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")


def carries_transfer_params(body: bytes) -> bool:
    """Tell whether a request body sets KV (or encoder cache) transfer parameters, or cannot be shown not to.

    Most bodies are cleared by one text search. The rest is parsed with every duplicate key in view, because parsers
    differ on which of two equal keys wins.
    """
    # The server decodes UTF-16 and UTF-32 JSON too: a search in the raw bytes would miss the names there.
    text = body.decode(json.detect_encoding(body), errors="replace")
    if not _mentions(text):
        return False
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return True
    return _sets_params(pairs, top_level=True)


def _mentions(text: str) -> bool:
    """Whether the names could come out of ``text`` once JSON's or a form's escapes are undone (may err towards yes)."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text) if "\\u" in text else text
    return bool(_MENTION.search(plain) or ("%" in plain and _MENTION.search(unquote(plain))))


class SecretGuard:
    """ASGI middleware around vLLM's application; answers 403 (or 413) itself and hides nothing else from it."""

    def __init__(self, app: App, secret: str | None = None, max_bytes: int | None = None) -> None:
        self._app = app
        self._secret = (secret if secret is not None else os.environ.get(SECRET_VARIABLE, "")).encode()
        self._max_bytes = max_bytes or int(os.environ.get(MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or not self._secret or self._knows_secret(scope["headers"]):
            if scope["type"] == "http" and scope["path"] == KV_CONFIG_PATH and self._secret:
                await _answer(send, 200, kv_config(scope))
                return
            await self._app(scope, receive, send)
            return
        held, body = await self._read(receive)
        if scope["path"] == KV_CONFIG_PATH:
            await _refuse(send, 403, f"{KV_CONFIG_PATH} is told to whoever knows the secret.")
        elif body is None:
            await _refuse(send, 413, f"Request body is larger than {self._max_bytes} bytes.")
        elif carries_transfer_params(body):
            await _refuse(send, 403, "kv_transfer_params and ec_transfer_params may only come from the gateway.")
        else:
            del body
            await self._app(scope, _replay(held, receive), send)

    def _knows_secret(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == SECRET.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self._secret)

    async def _read(self, receive: Receive) -> tuple[list[Message], bytes | None]:
        """Take the request's messages up to the end of its body; the body is ``None`` when it is too large."""
        held: list[Message] = []
        size_bytes = 0
        while True:
            message = await receive()
            held.append(message)
            if message["type"] != "http.request":  # the client left: the application will see it in its turn
                break
            size_bytes += len(message.get("body", b""))
            if size_bytes > self._max_bytes:
                return [], None
            if not message.get("more_body", False):
                break
        return held, b"".join(message.get("body", b"") for message in held)


def kv_config(scope: Scope) -> dict[str, Any]:
    """Return what this vLLM's connector was really configured with, as far as ``kvloop doctor`` asks; empty if unknown."""
    config = getattr(getattr(getattr(scope.get("app"), "state", None), "vllm_config", None), "kv_transfer_config", None)
    if config is None:
        return {}
    return {name: getattr(config, name, None) for name in ("kv_load_failure_policy", "kv_connector_extra_config")}


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its duplicate keys."""


def _sets_params(value: object, *, top_level: bool = False) -> bool:
    waiting = [(value, top_level)]  # a list and no recursion: nesting is the sender's choice
    while waiting:
        current, top = waiting.pop()
        if isinstance(current, _Pairs):
            if any(key in FORBIDDEN_KEYS for key, _ in current):
                return True
            waiting += [(inner, False) for key, inner in current if not (top and key in USER_DATA_FIELDS)]
        elif isinstance(current, list):
            waiting += [(inner, top) for inner in current]
    return False


def _replay(held: list[Message], receive: Receive) -> Receive:
    messages = iter(held)

    async def next_message() -> Message:
        for message in messages:
            return message
        return await receive()  # from here on only a disconnect can come, and the application waits for it

    return next_message


async def _refuse(send: Send, status: int, reason: str) -> None:
    kind, code = ("PermissionDeniedError", GUARD_CODE) if status == 403 else ("RequestEntityTooLargeError", status)  # noqa: PLR2004
    # The rest of an oversized body may still be on its way.
    await _answer(send, status, {"error": {"message": reason, "type": kind, "param": None, "code": code}}, closes=True)


async def _answer(send: Send, status: int, content: Any, *, closes: bool = False) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"connection", b"close")] if closes else []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
