"""The admin port: who may look inside, and what is seen there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession
from test_store import key, turn

from extproc.admin import is_loopback, start_admin
from extproc.debug_state import snapshot
from extproc.errors import ConfigError
from extproc.gateway import Gateway
from extproc.pool import PoolKnowledge
from extproc.readiness import Readiness
from extproc.receipt import Outcome, Reason, Receipt
from extproc.settings import GatewaySettings
from extproc.store import MemoryStore


def ask(path: str, *, is_draining: bool = False, is_reachable: bool = True, **settings: Any) -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        readiness = Readiness("http://127.0.0.1:10001")
        readiness.is_draining, readiness._is_reachable = is_draining, is_reachable
        chosen = GatewaySettings(admin_listen="127.0.0.1:0", **settings)
        gateway = Gateway(chosen, SimpleNamespace())
        gateway.store.put(key(1), turn())
        admin = await start_admin(gateway, readiness, chosen)
        host, port = admin.addresses[0]
        async with ClientSession() as session, session.get(f"http://{host}:{port}{path}") as response:
            answer = response.status, await response.read()
        await admin.cleanup()
        return answer

    return asyncio.run(run())


def test_a_replica_is_ready_when_envoy_s_prefill_listener_is_reached_and_until_it_drains() -> None:
    assert ask("/readyz") == (200, b"ok\n")
    assert ask("/readyz", is_draining=True) == (503, b"draining\n")
    status, text = ask("/readyz", is_reachable=False)
    assert (status, b"127.0.0.1:10001 does not answer (KVLOOP_PREFILL_URL)" in text) == (503, True)
    assert ask("/healthz", is_draining=True, is_reachable=False) == (200, b"ok\n"), "a restart would mend neither"


def test_the_state_is_json() -> None:
    status, body = ask("/debug/state")
    state = orjson.loads(body)
    assert status == 200
    assert state["version"]
    assert [row["conversation"] for row in state["conversations"]] == ["01" * 16]


@pytest.mark.parametrize(("limit", "shown"), [("0", 0), ("1", 1), ("x", 1), ("-1", 1), ("9" * 20, 1)])
def test_an_odd_limit_is_the_usual_one(limit, shown) -> None:
    status, body = ask(f"/debug/state?limit={limit}")
    assert (status, len(orjson.loads(body)["conversations"])) == (200, shown)


def test_it_can_be_switched_off() -> None:
    assert ask("/debug/state", debug_state="off")[0] == 404


@pytest.mark.parametrize(("setting", "status"), [("loopback", 403), ("anyone", 200)])
def test_from_elsewhere_it_is_answered_only_if_told_so(monkeypatch, setting, status) -> None:
    monkeypatch.setattr("extproc.admin.is_loopback", lambda _: False)
    answer = ask("/debug/state", debug_state=setting)
    assert answer[0] == status
    assert ask("/metrics", debug_state=setting)[0] == 200, "those are for whoever scrapes"
    assert status == 200 or b"KVLOOP_DEBUG_STATE=anyone" in answer[1]


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        *((peer, True) for peer in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")),
        *((peer, False) for peer in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", None)),
    ],
)
def test_what_this_machine_is(peer, expected) -> None:
    assert is_loopback(peer) is expected


def test_a_taken_port_is_named_with_the_fix() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = GatewaySettings(admin_listen=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="set KVLOOP_ADMIN_LISTEN to a free address"):
            await start_admin(Gateway(settings, SimpleNamespace()), Readiness("http://x"), settings)
        server.close()

    asyncio.run(run())


def test_what_the_state_tells() -> None:
    settings = GatewaySettings(handle_ttl_seconds=480, handle_margin_seconds=30)
    store, pool = MemoryStore(max_conversations=10, max_bytes=10**6), PoolKnowledge()
    pool.learn_block_size("engine-a", 32)
    store.put(key(1), turn("engine-a", deadline=1300.0))
    store.put(key(2), turn("engine-b", host="10.0.0.2", deadline=1400.0))
    told = Receipt(Outcome.COLD, Reason.NOTHING_KEPT, prompt_tokens=9, prefill_ms=5.0, conversation="ab")
    told.decode_ms, told.ttft_ms = 2.04, 8.06
    recent = [(990.0, Receipt()), (999.0, told)]
    state = snapshot(settings, pool, store, recent, now=1000.0, limit=1)
    assert (state["kept_turns"], state["prompt_ids_differed"]) == (2, False)
    assert state["engines"] == [
        {"address": "10.0.0.1:5600", "kept_turns": 1, "retained_tokens": 64, "block_size_tokens": 32},
        {"address": "10.0.0.2:5600", "kept_turns": 1, "retained_tokens": 64, "block_size_tokens": None},
    ]
    assert state["conversations"] == [
        {
            "conversation": "02" * 16,
            "engine": "10.0.0.2:5600",
            "model": "model",
            "tokens": 64,
            "age_seconds": 50.0,
            "expires_in_seconds": 400.0,
        }
    ]
    assert state["turns"] == [
        {
            "age_seconds": 1.0,
            "outcome": "cold",
            "reason": "nothing_kept",
            "prompt": 9,
            "prefill_ms": 5.0,
            "conversation": "ab",
            "decode_ms": 2.0,
            "ttft_ms": 8.1,
        }
    ]
    assert len(snapshot(settings, pool, store, recent, now=1000.0, limit=9)["turns"]) == 2
    assert snapshot(settings, pool, store, recent, now=1000.0, limit=0)["turns"] == []
