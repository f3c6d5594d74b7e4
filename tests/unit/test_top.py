"""``kvloop top`` without a gateway: what it says when there is nothing to see, and how the picture fits a terminal."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from extproc import cli, top
from extproc.errors import ConfigError
from extproc.top_picture import Sample
from extproc.top_screen import draw


def test_nobody_there(capsys) -> None:
    assert cli.main(["top", "127.0.0.1:1", "--once", "--json"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("kvloop: nothing to see (127.0.0.1:1: connection refused).")
    assert complaint.count("\n") == 1
    assert "KVLOOP_ADMIN_LISTEN" in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["localhost", "--once"], "localhost is no address: HOST:PORT"),
        (["--interval", "0"], "--interval is between 0.1 and 3600"),
        (["127.0.0.1:1"], "the live view needs a terminal"),
    ],
)
def test_wrong_use_is_told_in_one_line(capsys, arguments, complaint) -> None:
    assert cli.main(["top", *arguments]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert told.count("\n") == 1


def test_without_rich_json_is_offered(monkeypatch, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    assert cli.main(["top", "127.0.0.1:1", "--once"]) == 2
    assert "pip install '.[top]' in a checkout, or use --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("0.0.0.0:9464", "127.0.0.1:9464"), ("[::]:9464", "127.0.0.1:9464"), ("10.0.0.1:1", "10.0.0.1:1")],
)
def test_who_listens_everywhere_is_asked_here(listen, expected) -> None:
    assert top._reachable(listen) == expected


def ask(handler: Any) -> Sample:
    """Ask a server that answers everything by ``handler``."""

    async def run() -> Sample:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with top.aiohttp.ClientSession() as session:
            sample = await top._ask(session, f"{host}:{port}")
        await runner.cleanup()
        return sample

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (403, "", "KVLOOP_DEBUG_STATE=anyone"),
        (404, "", "KVLOOP_DEBUG_STATE=off"),
        (500, "", "HTTP status 500"),
        (200, "<html>", "not kvloop's admin port"),
    ],
)
def test_other_answers_are_explained(status, body, complaint) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    assert complaint in ask(handler).error


def look(at: float, *errors: str) -> list[Sample]:
    state = {"version": "1", "engines": [], "conversations": [], "turns": []}
    return [Sample(f"r{n}", at, {}, {} if error else state, error) for n, error in enumerate(errors)]


def test_the_window_slides() -> None:
    history = deque([look(0.0, "")])
    for second in range(1, 40):
        top._remember(history, look(float(second), ""))
        assert len(history) >= 2
    assert 39.0 - history[0][0].at == pytest.approx(10.0, abs=1.0)


def test_a_replica_is_compared_with_its_own_first_look() -> None:
    compared = top._seen([look(0.0, "", "down"), look(1.0, "", ""), look(2.0, "", "")])
    assert [row["up"] for row in compared["replicas"]] == [True, True]
    assert [row["up"] for row in top._seen([look(0.0, "", "down"), look(1.0, "down", "down")])["replicas"]] == [
        False
    ] * 2


def a_picture(engines: int, turns: int) -> dict[str, Any]:
    """A picture with that many engines, turns and conversations."""
    conversation = {"conversation": "ab" * 16, "replica": "a:1", "age_seconds": 75.0}
    turn = {**conversation, "outcome": "partial", "reason": "history_differs", "prompt": 12_345, "reused": 9_999}
    times = {"render_ms": 1.5, "prefill_ms": 1234.0, "decode_ms": 20.0, "ttft_ms": 1256.0}
    kept = {**conversation, "engine": "10.0.0.7:5600", "model": "some/Model-with-a-long-name-7B", "tokens": 5}
    replica = {
        "replica": "a:1",
        "up": True,
        "version": "1",
        "turns_per_second": 3.0,
        "live_requests": 2,
        "kept_turns": 4,
    }
    more = {
        "releases_waiting": 0,
        "cpu_cores": 0.5,
        "memory_bytes": 2**26,
        "prompt_ids_differed": False,
        "shared_store": False,
    }
    return {
        "replicas": [{**replica, **more}, {"replica": "b:1", "up": False, "error": "connection refused"}],
        "turns_per_second": {"partial": 2.0, "cold": 1.0} if turns else {},
        "reasons_per_second": {"history_differs": 2.0} if turns else {},
        "tokens_per_second": {"prompt": 1.0, "held": 1.0, "reused": 1.0},
        "reused_share": 0.81 if turns else None,
        "time_to_first_token": {"partial": {"median_seconds": 0.5, "p95_seconds": 2.0}} if turns else {},
        "time_to_first_token_parts": {"decode": 0.1, "prefill": 1.2} if turns else {},
        "engines": [{"address": f"d{n}:5600", "kept_turns": 1, "retained_tokens": 1000} for n in range(engines)],
        "conversations": [{**kept, "expires_in_seconds": 30.0}] * turns,
        "turns": [{**turn, **times}, {"outcome": "passed", "age_seconds": 1.0}] * (turns // 2),
    }


def drawn(seen: dict[str, Any], width: int, height: int) -> list[str]:
    console = Console(
        width=width, height=height, color_system=None, force_terminal=False, file=__import__("io").StringIO()
    )
    console.print(draw(seen, width, height))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(120, 40), (110, 30), (80, 36), (200, 60)])
@pytest.mark.parametrize(("engines", "turns"), [(0, 0), (1, 2), (3, 100), (40, 100)])
def test_the_picture_fits(width, height, engines, turns) -> None:
    lines = drawn(a_picture(engines, turns), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_what_the_picture_says() -> None:
    text = "\n".join(drawn(a_picture(40, 10), 120, 40))
    for words in (
        "1/2 up · 3.0 turns/s · 2 live · 4 kept · 81% of prompt tokens reused",
        "down: connection refused",
        "and 34 more",
        "abababababab",
        "12,345",
        "1.26 s",
        "1m15s",
    ):
        assert words in text
    assert "abababababababab" not in text


def test_what_a_shared_store_keeps_is_not_called_nothing() -> None:
    seen = a_picture(0, 0)
    before = "\n".join(drawn(seen, 120, 40))
    assert "nothing is kept" in before
    assert "none between the looks" in before
    for replica in seen["replicas"]:
        replica["shared_store"] = True
    told = "\n".join(drawn(seen, 120, 40))
    assert "in the shared store (not counted here)" in told
    assert "nothing is kept" not in told


def test_reuse_that_is_off_is_shouted() -> None:
    seen = a_picture(1, 2)
    seen["replicas"][0]["prompt_ids_differed"] = True
    assert "REUSE IS OFF" in "\n".join(drawn(seen, 120, 40))


def test_json_is_one_line(capsys) -> None:
    top._print_json({"a": [1]})
    assert json.loads(capsys.readouterr().out.removesuffix("\n")) == {"a": [1]}


def test_more_replicas_than_answer_are_no_reason_to_stop() -> None:
    with pytest.raises(ConfigError, match="r0: down; r1: down"):
        raise ConfigError(top._nobody(look(0.0, "down", "down")))
