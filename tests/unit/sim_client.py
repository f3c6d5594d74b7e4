"""Simulated workers without a gateway, and the legs kvloop would send them, by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

from workers.sim.fleet import Fleet
from workers.sim.settings import WorkerSettings
from workers.sim.worker import SimWorker

COLD = {"do_remote_decode": True, "do_remote_prefill": False}
CHAT = "/v1/chat/completions"


class SimClient(Fleet):
    """A fleet, and blocking HTTP to it."""

    def __init__(self, prefill: list[WorkerSettings], decode: list[WorkerSettings]) -> None:
        super().__init__(prefill, decode)

    def exchange(
        self, worker: SimWorker, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Post JSON; return status and body."""
        with contextlib.closing(http.client.HTTPConnection(worker.host, worker.port, timeout=20)) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, worker: SimWorker, path: str, body: Any) -> bytes:
        """Post JSON and insist on 200."""
        status, answer = self.exchange(worker, path, body)
        assert status == 200, answer
        return answer

    def get(self, worker: SimWorker, path: str) -> bytes:
        with contextlib.closing(http.client.HTTPConnection(worker.host, worker.port, timeout=20)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.status == 200
            return response.read()

    def prefill_leg(self, path: str, fields: dict[str, Any], handle: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send the prefill leg of a request, with the handle attached if one is given."""
        kept = {key: value for key, value in fields.items() if key in {"model", "messages", "prompt"}}
        leg = {"max_tokens": 1, "stream": False, "return_token_ids": True, "kv_transfer_params": handle or COLD}
        answer: dict[str, Any] = json.loads(self.post(self.prefill[0], path, {**kept, **leg}))
        return answer

    def turn(
        self, messages: list[dict[str, Any]], handle: dict[str, Any] | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Play one chat turn, both legs; return the text, D's handle, and what P passed on to D."""
        passed_on = self.prefill_leg(CHAT, {"messages": messages}, handle)["kv_transfer_params"]
        body = {"messages": messages, **fields, "kv_transfer_params": passed_on}
        answer = json.loads(self.post(self.decode[0], CHAT, body))
        return answer["choices"][0]["message"]["content"], answer["kv_transfer_params"], passed_on

    @staticmethod
    def text(answer: bytes) -> str:
        """Return what an answer says, streamed or not, chat or completion."""
        bodies = [json.loads(event[6:]) for event in answer.split(b"\n\n") if event.startswith(b"data: {")]
        choices = [choice for body in bodies or [json.loads(answer)] for choice in body["choices"]]
        return "".join(_said(choice) for choice in choices)


def _said(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return message.get("content") or choice.get("text") or ""
