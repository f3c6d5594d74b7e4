"""Clients of many multi-turn conversations, each of whose answers is compared with what right KV makes a worker say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fault_site import DECODE, MODEL_NAME

from bench.site import HOST
from workers.sim.answer import right_answer
from workers.sim.text import WORDS

CLIENTS = 8
HANG_SECONDS = 45.0
"""No request may take longer: the timeouts of its legs (9 s), the longest pause of a part (8 s) twice, its answer, and a busy
machine's share."""

INTERNAL_WORDS = (b"remote_block_ids", b"remote_engine_id", b"kvloop_digest")


class Verdict(StrEnum):
    """How a request ended."""

    RIGHT = "right"
    LEFT = "left"
    """The client went away by itself."""
    FAILED = "failed"
    """It got an honest error, or its connection broke; what it got of an answer was right."""
    WRONG = "wrong"
    """It got an answer that right KV does not give, or one that lacks its end unnoticed, or what no client may see."""
    HUNG = "hung"


@dataclass(slots=True)
class Record:
    """One request, judged. Times are monotonic seconds."""

    sent_at: float
    ended_at: float = 0.0
    verdict: Verdict = Verdict.HUNG
    what: str = ""
    request_id: str = ""
    status: int = 0


@dataclass(slots=True)
class Got:
    """What came back on one connection."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    broken: str = ""


class Load:
    """The clients, in an event loop of their own thread. What they do is drawn from ``seed``; when, the machine decides."""

    def __init__(self, port: int, seed: int, clients: int = CLIENTS) -> None:
        self.port = port
        self._seed = seed
        self._clients = clients
        self._records: list[Record] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-load", daemon=True)
        self._go: asyncio.Event = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.under_way = 0

    def start(self) -> None:
        """Let the clients begin."""
        self._thread.start()
        self._loop.call_soon_threadsafe(self._begin)

    def pause(self) -> None:
        """Let every client finish its turn and then wait."""
        self._loop.call_soon_threadsafe(self._go.clear)

    def go_on(self) -> None:
        """Let the clients go on."""
        self._loop.call_soon_threadsafe(self._go.set)

    def stop(self) -> None:
        """End all clients."""

        async def cancel() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def take_records(self) -> list[Record]:
        """Return the requests that ended since the last call."""
        with self._lock:
            records, self._records = self._records, []
        return records

    def one_conversation(self, seed: int, turns: int = 2) -> list[Record]:
        """Have one well-behaved client take some turns now, and return how they went."""
        dice = random.Random(seed)
        return asyncio.run_coroutine_threadsafe(self._conversation(dice, turns, plain=True), self._loop).result(
            HANG_SECONDS * (turns + 1)
        )

    # --- a client ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._go.set()
        self._tasks = [self._loop.create_task(self._client(number)) for number in range(self._clients)]

    async def _client(self, number: int) -> None:
        dice = random.Random(f"{self._seed}-{number}")
        while True:
            await self._conversation(dice, dice.randint(1, 5), plain=False)

    async def _conversation(self, dice: random.Random, turns: int, *, plain: bool) -> list[Record]:
        name = f"c-{dice.getrandbits(64):x}"
        messages: list[dict[str, str]] = [{"role": "user", "content": _words(dice, dice.randint(80, 350))}]
        records = []
        for _ in range(turns):
            if not plain:
                await self._go.wait()
            habit = "plain" if plain else dice.choices(HABITS, HABIT_WEIGHTS)[0]
            record, text = await self._turn(name, messages, habit, dice)
            records.append(record)
            if record.verdict is not Verdict.RIGHT:
                await asyncio.sleep(0.1)  # as a client does that tries again
                continue
            if habit == "again":
                continue
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": _words(dice, 12)}]
            if habit == "edits":
                messages[0] = {"role": "user", "content": _words(dice, 100)}
        return records

    async def _turn(
        self, name: str, messages: list[dict[str, str]], habit: str, dice: random.Random
    ) -> tuple[Record, str]:
        body = {"model": MODEL_NAME, "messages": messages, "stream": habit != "whole", "max_tokens": 40}
        right = right_answer("chat", dict(body), DECODE)
        record = Record(time.monotonic())
        leaves_after = dice.uniform(0.0, 0.8) if habit == "leaves" else None
        self.under_way += 1
        try:
            async with asyncio.timeout(HANG_SECONDS):
                got = await self._exchange(name, json.dumps(body).encode(), habit, leaves_after, dice.random())
        except TimeoutError:
            record.what = f"no end after {HANG_SECONDS} s"
        else:
            _judge(record, got, right, streamed=habit != "whole")
        finally:
            self.under_way -= 1
        record.ended_at = time.monotonic()
        with self._lock:
            self._records.append(record)
        return record, right

    async def _exchange(
        self, name: str, body: bytes, habit: str, leaves_after: float | None, chance: float
    ) -> Got | None:
        """Send one request on a connection of its own and read its answer; None if the client left first."""
        connection = socket.socket()
        connection.setblocking(False)
        if habit == "slow":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        got = Got()
        try:
            await self._loop.sock_connect(connection, (HOST, self.port))
            reader, writer = await asyncio.open_connection(sock=connection, limit=2048 if habit == "slow" else 65_536)
        except OSError as error:
            connection.close()
            got.broken = repr(error)
            return got
        try:
            async with asyncio.timeout(leaves_after):
                await _converse(reader, writer, _request(name, body), got, slow=habit == "slow")
        except TimeoutError:
            if leaves_after is None:
                raise
            if chance < 0.5:  # half of those who leave do so without a goodbye
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return got


HABITS = ("plain", "whole", "leaves", "slow", "edits", "again")
HABIT_WEIGHTS = (70, 8, 6, 4, 8, 4)
"""``whole``: not streamed; ``edits``: rewrites its history afterwards; ``again``: sends the same turn once more."""


def _words(dice: random.Random, count: int) -> str:
    return "".join(dice.choices(WORDS, k=count))


def _request(name: str, body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"x-conversation-id: {name}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, got: Got, *, slow: bool
) -> None:
    """Send the request and read the answer as far as it comes."""
    try:
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        got.status = int(head[0].split()[1])
        got.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        if got.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).strip() or b"0", 16):
                got.body += (await reader.readexactly(size + 2))[:-2]
                if slow:
                    await asyncio.sleep(0.05)
        else:
            got.body = await reader.readexactly(int(got.headers.get("content-length", "0")))
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        if isinstance(error, asyncio.IncompleteReadError) and got.status:
            got.body += error.partial
        got.broken = repr(error)


# --- judging --------------------------------------------------------------------------------------------------------


def _judge(record: Record, got: Got | None, right: str, *, streamed: bool) -> None:
    """Tell right from wrong, and wrong from failed."""
    if got is None:
        record.verdict = Verdict.LEFT
        return
    record.status = got.status
    record.request_id = got.headers.get("x-request-id", "")
    record.verdict, record.what = judge(got, right, streamed=streamed)


def judge(got: Got, right: str, *, streamed: bool) -> tuple[Verdict, str]:
    """Return the verdict on an answer, and what is to be said of it."""
    if any(word in got.body for word in INTERNAL_WORDS):
        return Verdict.WRONG, f"shows what no client may see: {got.body[-300:]!r}"
    if got.status != 200:
        return _judge_error(got)
    said = "".join(_said(got.body, streamed=streamed, broken=bool(got.broken)))
    if got.broken or b'data: {"error":' in got.body:
        is_right = right.startswith(said)
        return (Verdict.FAILED if is_right else Verdict.WRONG), f"cut off ({got.broken or 'error'}) after {said!r}"
    if said != right:
        return Verdict.WRONG, f"says {said!r} and not {right!r}"
    if streamed and not got.body.endswith(b"data: [DONE]\n\n"):
        return Verdict.WRONG, f"lacks its end unnoticed: {got.body[-100:]!r}"
    return Verdict.RIGHT, ""


def _judge_error(got: Got) -> tuple[Verdict, str]:
    if not got.status:
        return Verdict.FAILED, f"no answer: {got.broken}"
    what = f"{got.status} {got.body[:200]!r} {got.broken}"
    if got.broken:
        return Verdict.FAILED, what
    try:
        message = json.loads(got.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Verdict.WRONG, f"an error that is none to an SDK: {what}"
    honest = isinstance(message, str) and got.status in (503, 504)
    if got.status == 503 and "retry-after" not in got.headers:
        honest = False
    return (Verdict.FAILED if honest else Verdict.WRONG), what


def _said(body: bytes, *, streamed: bool, broken: bool) -> Iterator[str]:
    """Yield the pieces of the answer's text; of a broken answer, those that arrived whole."""
    if not streamed:
        with contextlib.suppress(ValueError if broken else ()):
            for choice in json.loads(body)["choices"]:
                yield choice["message"]["content"]
        return
    for event in body.split(b"\n\n")[:-1]:
        if event.startswith(b"data: {"):
            message: dict[str, Any] = json.loads(event[6:])
            for choice in message.get("choices", ()):
                yield choice["delta"].get("content") or ""
