"""What the benchmarks measure with: the HTTP client, the process reader, the statistics, the tables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from bench.http_stream import Answer, Connections, post
from bench.load import costs, is_good, per
from bench.peers.command import as_row, as_text, joined, with_added_time
from bench.peers.command import is_good as peers_are_good
from bench.peers.fronts import LEGS
from bench.processes import proxy_and_load_cores, usable_cores, usage_of
from bench.site import without_ext_proc
from bench.statistics import percentiles, two_costs
from bench.tables import table
from bench.traffic import said
from extproc import envoy_config
from extproc.settings import EnvoySettings
from workers import venvs
from workers.venvs import Environment, PeerAbsentError

STREAM = b'data: {"choices":[{"delta":{"content":" a"}}]}\n\ndata: {"choices":[{"delta":{"content":" b"}}]}\n\ndata: [DONE]\n\n'


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Kvloop-Receipt: outcome=cold\r\n\r\n" + body


def answered(*answers: bytes, cut_at: int | None = None, requests: int = 1) -> tuple[list[Answer], int]:
    """Serve ``answers`` on one connection each after the other, cut once; return what the client saw."""
    connections_made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections_made
        connections_made += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                await reader.readuntil(b"the body")
                writer.write(answer[:cut_at])
                if cut_at is not None:
                    await writer.drain()
                    await asyncio.sleep(0.005)
                    writer.write(answer[cut_at:])
                await writer.drain()
        writer.close()

    async def ask() -> list[Answer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Connections("127.0.0.1", port)
        got = [await pool.send(post("x", "/", b"the body", {"a": "b"})) for _ in range(requests)]
        pool.close()
        server.close()
        assert pool.events == sum(count for answer in got for _, count in answer.event_times)
        return got

    return asyncio.run(ask()), connections_made


@pytest.mark.parametrize("cut_at", [None, 3, 20, len(chunked(STREAM)) - 4, len(chunked(STREAM)) - 1])
def test_a_streamed_answer_is_read_to_its_end_however_it_is_cut(cut_at: int | None) -> None:
    (answer,), _ = answered(chunked(STREAM[:50], STREAM[50:]), cut_at=cut_at)
    assert (answer.status, answer.broken, answer.body()) == (200, "", STREAM)
    assert answer.header(b"x-kvloop-receipt") == b"outcome=cold"
    assert said(answer.body()) == " a b"


def test_events_are_timed_as_they_arrive() -> None:
    second_event = STREAM.index(b"data", 1)
    whole = chunked(STREAM[:second_event], STREAM[second_event:])
    (answer,), _ = answered(whole, cut_at=whole.rindex(b"data: {"))
    assert [count for _, count in answer.event_times] == [1, 1]
    (first, _), (second, _) = answer.event_times
    assert answer.first_event_at == first
    assert answer.sent_at < first < second <= answer.ended_at


def test_a_connection_is_used_again() -> None:
    full = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwhat"
    answers, connections = answered(full, chunked(STREAM), requests=2)
    assert [answer.body() for answer in answers] == [b"what", STREAM]
    assert connections == 1


def test_an_answer_that_breaks_off_says_so() -> None:
    (answer,), _ = answered(chunked(STREAM)[:-5])
    assert answer.broken
    (answer,), _ = answered(b"")
    assert (answer.status, bool(answer.broken)) == (0, True)


def test_nobody_there_is_a_failed_answer() -> None:
    async def ask() -> Answer:
        return await Connections("127.0.0.1", 1).send(b"")

    assert asyncio.run(ask()).broken


def test_usage_counts_a_process_own_cpu_and_memory() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:  # noqa: S603
        assert process.stdout is not None
        process.stdout.readline()
        used = usage_of([process.pid])
        process.kill()
    assert 0.28 <= used.cpu_seconds < 5
    assert 3 < used.rss_mib < 500
    time.sleep(0.01)
    assert usage_of([process.pid]).cpu_seconds == 0


def test_names_with_parentheses_do_not_shift_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    own = usage_of([os.getpid()])
    text = f"1 (a) R (b) S {' '.join(['0'] * 10)} 300 200 {' '.join(['0'] * 8)} 256 0\n"
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: text)
    used = usage_of([1])
    assert used.cpu_seconds == pytest.approx(500 / os.sysconf("SC_CLK_TCK"))
    assert used.rss_mib == pytest.approx(256 * os.sysconf("SC_PAGE_SIZE") / 2**20)
    assert own.rss_mib > 0


@pytest.mark.parametrize(
    ("cores", "proxies", "load"),
    [({3}, {3}, {3}), ({0, 1}, {0}, {1}), ({0, 1, 2, 3}, {0}, {1, 2})],
)
def test_what_is_measured_has_a_core_of_its_own(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], proxies: set[int], load: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert usable_cores() == sorted(cores)
    assert proxy_and_load_cores() == (frozenset(proxies), frozenset(load))


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentiles(values, scale=10) == {"p50": 510.0, "p90": 910.0, "p99": 1000.0, "max": 1000.0}
    assert percentiles([]) == {}


def test_two_runs_tell_a_request_from_a_chunk() -> None:
    def cost(requests: int, chunks: int) -> float:
        return 0.002 * requests + 0.00005 * chunks

    request, chunk = two_costs((cost(100, 200), 100, 200), (cost(50, 5000), 50, 5000))
    assert (request, chunk) == (pytest.approx(0.002), pytest.approx(0.00005))
    with pytest.raises(ValueError, match="same number"):
        two_costs((1, 10, 20), (2, 20, 40))


def run(requests: int, chunks: int, first_ms: float = 5.0, **changes: Any) -> dict[str, Any]:
    return {
        "turns": requests,
        "chunks": chunks,
        "failed": 0,
        "seconds": 2.0,
        "requests_per_second": requests / 2,
        "chunks_per_second": chunks / 2,
        "ttft_ms": {"p50": first_ms, "p99": 4 * first_ms},
        "between_chunks_ms": {},
        "late_ms": {},
        "render_ms": {},
        "prefill_ms": {"p50": 2.0},
        "outcomes": {"cold": requests},
        "first_token_seconds": [first_ms / 1000] * requests,
        "wrong_kv_turns": 0,
        "handles_used_twice": 0,
        "generator_cpu_seconds": 0.1,
        "cpu_seconds": {"proxy": 0.001 * requests + 0.00004 * chunks, "workers": 1.0},
        "rss_mib": {"proxy": 30.0, "workers": 80.0},
        **changes,
    }


def test_costs_are_by_process() -> None:
    assert costs(run(100, 200), run(40, 4000))["proxy"] == {"ms_per_request": 1.0, "us_per_chunk": 40.0}
    assert per({"proxy": 0.5}, 1000, 1e6) == {"proxy": 500.0}
    assert costs(run(0, 0), run(40, 4000)) == {}


def row(name: str, first_ms: float, *, both: bool = True, **changes: Any) -> dict[str, Any]:
    measured = as_row(run(100, 200), run(40, 4000, first_ms))
    return {"name": name, "does_both_legs": both, **measured, "wrong_kv_turns": 0, "handles_used_twice": 0, **changes}


def test_added_time_is_over_the_legs_own_in_the_same_run() -> None:
    absent = {"name": "gone", "does_both_legs": True, "absent": "not there"}
    rows = with_added_time([row(LEGS, 5.0), row("D", 1.0, both=False), row("kvloop", 7.5), absent])
    assert [each.get("added_ttft_ms") for each in rows] == [None, None, {"p50": 2.5, "p99": 10.0}, None]
    assert with_added_time([row("kvloop", 7.5)])[0].get("added_ttft_ms") is None


def test_rounds_are_pooled() -> None:
    calm = {"name": "kvloop", "runs": [run(100, 200), run(40, 4000, 5.0)]}
    busy = {"name": "kvloop", "runs": [run(50, 100), run(20, 2000, 50.0, wrong_kv_turns=1, prefill_ms={"p50": 4.0})]}
    one = joined([calm, busy])
    assert (one["turns"], one["wrong_kv_turns"], one["outcomes"]) == (210, 1, {"cold": 60})
    assert (one["ttft_ms"]["p50"], one["ttft_ms"]["p99"]) == (5.0, 50.0)
    assert (one["us_per_chunk"], one["ms_per_request"]) == (40.0, 1.0)
    assert one["prefill_ms"] == {"p50": 3.0}
    assert joined([calm, {"name": "kvloop", "absent": "died"}]) == {"name": "kvloop", "absent": "died"}


def test_absent_peers_are_named_and_kvloop_may_not_be_one() -> None:
    absent = {"name": "FastAPI + httpx", "does_both_legs": True, "absent": "no network"}
    result = {"peers": [row("kvloop", 5.0), absent], "concurrency": 32, "cores": {}, "machine": {"load": 0.1}}
    assert "absent: FastAPI + httpx: no network" in as_text(result)
    assert peers_are_good(result)
    assert not peers_are_good({"peers": [{"name": "kvloop", "absent": "died"}]})
    assert not peers_are_good({"peers": [row("kvloop", 5.0, wrong_kv_turns=1)]})
    assert not peers_are_good({"peers": [row("kvloop", 5.0, failed=1)]})


def test_a_load_run_is_good_only_if_nothing_is_left_behind() -> None:
    clean = {"turns": 9} | dict.fromkeys(
        ("failed", "wrong_kv_turns", "handles_used_twice", "leaked_pins", "pins_after_ttl"), 0
    )
    assert is_good(clean)
    assert not is_good({**clean, "turns": 0})
    for key in clean.keys() - {"turns"}:
        assert not is_good({**clean, key: 1}), key


def test_a_peer_that_cannot_be_installed_is_absent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path))
    environment = Environment("none", ("./no-such-directory-here",))
    with pytest.raises(PeerAbsentError, match="none could not be installed"):
        environment.make(lambda _: None)
    assert not environment.is_ready


def test_an_environment_is_made_again_when_its_requirements_change(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path))
    ran: list[list[str]] = []
    monkeypatch.setattr("workers.venvs._run", lambda argv, _: ran.append(argv))
    environment = Environment("one", ("a==1",))
    environment.directory.mkdir(parents=True)
    environment.make(lambda _: None)
    assert environment.is_ready
    environment.make(lambda _: None)
    assert len(ran) == 2
    assert not Environment("one", ("a==2",)).is_ready


def test_setting_up_does_not_fail_over_an_environment_that_cannot_be_had(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: object) -> None:
        raise PeerAbsentError("vllm-router could not be installed: no network")

    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr("workers.venvs._run", offline)
    venvs.main()
    assert "vllm-router could not be installed: no network\nOnly the tests" in capsys.readouterr().out


def test_envoy_alone_is_kvloops_envoy_without_ext_proc() -> None:
    import yaml  # noqa: PLC0415 - only here

    with_it = yaml.safe_load(envoy_config.render(EnvoySettings()))
    without = without_ext_proc(with_it)
    assert "ext_proc" not in yaml.safe_dump(without).lower()
    assert [cluster["name"] for cluster in without["static_resources"]["clusters"]] == [
        "prefill",
        "prefill_by_conversation",
        "decode",
    ]
    kept = [listener["address"] for listener in with_it["static_resources"]["listeners"]]
    assert [listener["address"] for listener in without["static_resources"]["listeners"]] == kept


def test_tables_are_markdown() -> None:
    assert table(["a", "long"], [["xyz", "1"]]).splitlines() == [
        "| a   | long |",
        "| --- | ---: |",
        "| xyz |    1 |",
    ]
