"""A client of the real stack: asks it, looks into it, breaks it."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from workers.stack import Stack

MODEL = "tiny"
BLOCK_SIZE_SECONDS = 10.0


@dataclass(frozen=True)
class Reply:
    """An answer as a client sees it. ``messages``: the JSON of every event, or of the whole answer."""

    status: int
    headers: httpx.Headers
    raw: bytes
    messages: list[dict[str, Any]]

    @property
    def receipt(self) -> dict[str, str]:
        return dict(item.split("=", 1) for item in self.headers["x-kvloop-receipt"].split(", "))

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for message in self.messages for choice in message.get("choices", [])]

    @property
    def text(self) -> str:
        parts = (c.get("delta") or c.get("message") or {"content": c.get("text")} for c in self.choices)
        return "".join(part.get("content") or "" for part in parts)

    @property
    def first_logprobs(self) -> dict[str, float]:
        """Log-probabilities of the most likely first tokens of a chat answer."""
        for choice in self.choices:
            content = (choice.get("logprobs") or {}).get("content")
            if content:
                return {top["token"]: top["logprob"] for top in content[0]["top_logprobs"]}
        raise AssertionError(f"no log-probabilities in {self.raw[:500]!r}")


class Gateway:
    """What the tests do to the stack: ask it, look into it, break it."""

    def __init__(self, stack: Stack, base_url: str | None = None) -> None:
        self.stack = stack
        self._http = httpx.Client(base_url=base_url or stack.base_url, timeout=120, trust_env=False)

    def post(self, path: str, body: Any, *, conversation: str | None = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if conversation is not None:
            named["x-conversation-id"] = conversation
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self._http.post(path, content=content, headers={"content-type": "application/json", **named})
        if conversation is not None and not self.stack.options.decode.get("digest", True):
            self._wait_for_block_sizes()
        raw = answer.content
        if "event-stream" in answer.headers.get("content-type", ""):
            texts = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: {")]
            messages = [json.loads(text) for text in texts]
        else:
            messages = [json.loads(raw)] if raw.startswith(b"{") else []
        return Reply(answer.status_code, answer.headers, raw, messages)

    def _wait_for_block_sizes(self) -> None:
        """Wait until kvloop knows the block size of each D it keeps a handle of, which it asks for in the background.

        A D with our digest tells it in its handles. Without waiting, a test's second turn may come before the answer.
        """
        url = f"http://127.0.0.1:{self.stack.ports.extproc_admin}/debug/state"
        deadline = time.monotonic() + BLOCK_SIZE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                engines = self._http.get(url).json()["engines"]
                if all(engine["block_size_tokens"] for engine in engines):
                    return
            time.sleep(0.01)

    def chat(self, messages: list[dict[str, Any]], conversation: str | None = None, **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, "stream": True, **fields}
        return self.post("/v1/chat/completions", body, conversation=conversation)

    def complete(self, prompt: Any, conversation: str | None = None, **fields: Any) -> Reply:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": True, **fields}
        return self.post("/v1/completions", body, conversation=conversation)

    def at_once(self, *calls: Any) -> list[Reply]:
        """Run calls without arguments at the same time."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: call(), calls))
