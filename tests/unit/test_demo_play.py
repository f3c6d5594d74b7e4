"""What the demo sends, and what it reads out of a stream. The server is a stand-in that speaks OpenAI's protocol."""

from __future__ import annotations

import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from openai import InternalServerError

from workers.demo.conversation import QUESTIONS, next_messages
from workers.demo.play import Turn, play
from workers.supervision import StackError

if TYPE_CHECKING:
    from collections.abc import Iterator

RECEIPT = "outcome=reused, reused=7, prompt=10, prefill_ms=1.0"


def chunk(content: str | None, token: int | None = None, **fields: Any) -> dict[str, Any]:
    name = f"token_id:{token}"
    logprobs = {
        "content": [
            {
                "token": name,
                "logprob": -0.25,
                "bytes": None,
                "top_logprobs": [
                    {"token": name, "logprob": -0.25, "bytes": None},
                    {"token": "token_id:9", "logprob": -1.5, "bytes": None},
                ],
            }
        ]
    }
    choice = {
        "index": 0,
        "delta": {"content": content},
        "logprobs": None if token is None else logprobs,
        "finish_reason": None,
    }
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice | fields]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0}
    return {**chunk(None), "choices": [], "usage": counts}


class Server(http.server.ThreadingHTTPServer):
    """Answers chat requests with ``events``; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.events: list[dict[str, Any]] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, "application/json", b'{"object": "list", "data": []}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if self.server.status != 200:
            self.reply(self.server.status, "application/json", b'{"error": {"message": "no workers"}}')
            return
        events = [json.dumps(event) for event in self.server.events] + ["[DONE]"]
        self.reply(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-kvloop-receipt", RECEIPT)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.events = [
            chunk(""),
            chunk("Twelve", 1),
            chunk(None, 2),
            chunk(" nests.", 3),
            chunk("", 4, finish_reason="stop"),
            usage(10, 4),
        ]
        yield server
        server.shutdown()
        thread.join()


def played(server: Server, turns: int = 1) -> list[Turn]:
    return list(play(server.url, "m", "DOCUMENT", turns=turns, name="chat-1", max_tokens=64))


def test_a_turn_is_read_out_of_its_stream(server: Server) -> None:
    (turn,) = played(server)
    assert turn.answer == "Twelve nests."
    assert [token.token for token in turn.tokens] == ["token_id:1", "token_id:2", "token_id:3", "token_id:4"]
    assert turn.tokens[0].candidates == {"token_id:1": -0.25, "token_id:9": -1.5}
    assert (turn.prompt_tokens, turn.completion_tokens, turn.finish_reason) == (10, 4, "stop")
    assert (turn.receipt, turn.reused_tokens, turn.held_tokens) == (RECEIPT, 7, 13)
    assert 0 < turn.ttft_seconds <= turn.total_seconds


def test_requests_are_streamed_greedy_and_belong_to_one_conversation(server: Server) -> None:
    played(server, turns=2)
    for _, body in server.requests:
        assert body["session_id"] == body["cache_salt"] == "chat-1"
        assert (body["stream"], body["temperature"], body["max_tokens"]) == (True, 0, 64)
        assert (body["stream_options"], body["logprobs"]) == ({"include_usage": True}, True)


def test_each_answer_goes_into_the_next_turns_history(server: Server) -> None:
    played(server, turns=3)
    assert [body["messages"] for _, body in server.requests] == [
        [message.as_json() for message in next_messages("DOCUMENT", ["Twelve nests."] * turn)] for turn in range(3)
    ]


def test_turns_are_played_one_at_a_time(server: Server) -> None:
    turns = play(server.url, "m", "DOCUMENT", turns=len(QUESTIONS), name="chat-1", max_tokens=64)
    assert next(turns).question == QUESTIONS[0]
    assert len(server.requests) == 1


def test_a_stream_that_is_cut_off_is_an_error(server: Server) -> None:
    server.events = server.events[:3]
    with pytest.raises(StackError, match="ended without its usage"):
        played(server)


def test_an_error_is_raised_and_not_retried(server: Server) -> None:
    server.status = 503
    with pytest.raises(InternalServerError, match="no workers"):
        played(server)
    assert len(server.requests) == 1
