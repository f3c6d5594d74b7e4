"""Runs every peer through the same two loads, and sets the results side by side.

Both loads keep so many streams under way (a closed loop, so that every peer has the same concurrency). The first has the
shortest answers, the second long ones; from the two, what a request and what a chunk costs is told apart. TTFT is the
second load's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.load import AFTER_TTL_SECONDS, costs, per
from bench.peers.fronts import KVLOOP, LEGS, PEERS, Peer
from bench.plots import plot_peers
from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.run import run_traffic
from bench.site import HOST, Site, SiteOptions
from bench.statistics import percentiles
from bench.tables import table
from workers.supervision import StackError
from workers.venvs import PeerAbsentError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

DECODE_TOKENS_PER_SECOND: Final = 100.0
WARM_UP_TURNS: Final = 6
MUST_BE_ZERO: Final = ("wrong_kv_turns", "handles_used_twice")


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long each of the two loads runs, in seconds, and the answers of the second, in tokens."""

    short_seconds: float
    long_seconds: float
    answer_tokens: tuple[int, int]
    rounds: int = 1
    """Each peer has its turn in every round, so that a noisy minute of the machine hits all of them."""


QUICK: Final = Lengths(1.5, 2.5, (32, 96))
FULL: Final = Lengths(3.0, 8.0, (64, 192), rounds=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the comparison."""
    parser.add_argument("--quick", action="store_true", help="less than a minute in all (once the peers are installed)")
    parser.add_argument("--concurrency", type=int, default=32, help="streams under way (default: %(default)s)")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated parts of peers' names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result there (PNG or SVG)")


def main(args: argparse.Namespace) -> int:
    """Measure all peers, tell, and return 1 if kvloop failed a turn or let one attend to wrong KV."""
    lengths = QUICK if args.quick else FULL
    line = ProgressLine()
    # Quickly: what tells most. The token-id way costs as much time again and says less.
    chosen = [peer for peer in PEERS if not (args.quick and peer.name == "kvloop, token ids")]
    if args.only:
        chosen = [peer for peer in PEERS if any(part in peer.name for part in args.only.split(","))]
    options = SiteOptions(decode_tokens_per_second=DECODE_TOKENS_PER_SECOND)
    with tempfile.TemporaryDirectory(prefix="kvloop-peers-") as directory, Site(Path(directory), options) as site:
        comparison = Comparison(site, lengths, args.concurrency, line.tell)
        rounds = [[comparison.measure(peer) for peer in chosen] for _ in range(lengths.rounds)]
    peers = [joined(rows) for rows in zip(*rounds, strict=True)]
    line.end()
    result = {
        "quick": args.quick,
        "concurrency": args.concurrency,
        "cores": {"proxies": sorted(site.proxy_cores), "load and workers": sorted(site.load_cores)},
        "peers": with_added_time(peers),
        "machine": machine(),
    }
    if args.json is not None:
        write_json(args.json, result)
    if args.plot is not None:
        plot_peers(result, args.plot)
    print(as_text(result))
    return 0 if is_good(result) else 1


@dataclass(slots=True)
class Comparison:
    """The same two loads for every peer."""

    site: Site
    lengths: Lengths
    concurrency: int
    tell: Callable[[str], None]

    def measure(self, peer: Peer) -> dict[str, Any]:
        """Return a peer's row, or why it is absent."""
        row = {"name": peer.name, "about": peer.about, "does_both_legs": peer.does_both_legs}
        try:
            return {**row, "runs": self._measure(peer)}
        except (PeerAbsentError, StackError) as error:
            return {**row, "absent": str(error)}
        finally:
            self.site.take_down()

    def _measure(self, peer: Peer) -> list[dict[str, Any]]:
        site = self.site
        # What the peer before left pinned on D would be blocks that this one lacks.
        site.skip(AFTER_TTL_SECONDS)
        if peer.environment is not None:
            peer.environment.make(self.tell)
        port = site.decode[0]
        if peer.front is not None:
            front = peer.front(site)
            site.put_in_front(front.components, front.is_ready)
            port = front.port
        warm_up(port, peer.name)
        prefill_port = site.prefill[0] if peer.name == LEGS else None
        before = {key: site.total(key) for key in MUST_BE_ZERO}
        runs = [
            run_traffic(
                site,
                port,
                seconds=seconds,
                seed=seed,
                profile=self.profile(low, high, gap_seconds),
                prefill_port=prefill_port,
                tell=lambda text: self.tell(f"{peer.name}: {text}"),
            )
            for seed, (seconds, low, high, gap_seconds) in enumerate(
                (
                    (self.lengths.short_seconds, 2, 2, 0.3),
                    (self.lengths.long_seconds, *self.lengths.answer_tokens, 0.0),
                )
            )
        ]
        runs[1] |= {key: site.total(key) - before[key] for key in MUST_BE_ZERO}
        return runs

    def profile(self, low: int, high: int, gap_seconds: float) -> dict[str, Any]:
        """Return a load with answers of ``low`` to ``high`` tokens."""
        return {
            "concurrency": self.concurrency,
            "turns": {"constant": 4},
            "gap_seconds": {"constant": gap_seconds},
            "first_prompt_tokens": {"uniform": [200, 400]},
            "next_prompt_tokens": {"uniform": [20, 60]},
            "answer_tokens": {"uniform": [low, high]},
        }


def warm_up(port: int, name: str) -> None:
    """Play a short conversation, so that first uses are not measured; raises ``StackError`` if it is not served."""
    messages = [{"role": "user", "content": " baba" * 100}]
    for turn in range(WARM_UP_TURNS):
        body = json.dumps({"model": "sim", "messages": messages, "stream": False, "max_tokens": 4, "ignore_eos": True})
        headers = {"content-type": "application/json", "x-conversation-id": f"warm-up-{name}"}
        with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=10)) as connection:
            try:
                connection.request("POST", "/v1/chat/completions", body, headers)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise StackError(f"{name} did not serve a turn: {error!r}") from error
        if response.status != http.client.OK:
            raise StackError(f"{name} answered turn {turn} with {response.status}: {text[:200]}")
        said = json.loads(text)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": " dede" * 10}]


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a peer's row of all rounds: its measurements pooled, or why it is absent."""
    first = dict(rows[0])
    runs = first.pop("runs", None)
    absent = next((row["absent"] for row in rows if row.get("absent")), None)
    if runs is None or absent is not None:
        return {**first, "absent": absent}
    few, many = zip(*(row["runs"] for row in rows), strict=True)
    return {
        **first,
        **as_row(pooled(few), pooled(many)),
        **{key: sum(run[key] for run in many) for key in MUST_BE_ZERO},
    }


def pooled(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several runs as one: counts added, times to first token pooled, other spreads averaged."""
    total = dict(runs[0])
    for key in ("turns", "failed", "chunks", "seconds", "generator_cpu_seconds"):
        total[key] = sum(run[key] for run in runs)
    for key in ("cpu_seconds", "outcomes"):
        total[key] = dict(sum((Counter(run[key]) for run in runs), Counter()))
    for key in ("between_chunks_ms", "late_ms", "render_ms", "prefill_ms", "rss_mib"):
        names = {name for run in runs for name in run[key]}
        found = {name: [run[key][name] for run in runs if name in run[key]] for name in names}
        total[key] = {name: round(sum(values) / len(values), 3) for name, values in sorted(found.items())}
    total["requests_per_second"] = total["turns"] / total["seconds"]
    total["chunks_per_second"] = round(sum(run["chunks_per_second"] for run in runs) / len(runs))
    total["ttft_ms"] = percentiles([each for run in runs for each in run["first_token_seconds"]], scale=1000)
    return total


def as_row(few: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """Return what the table shows of two runs; CPU is of the peer's own processes, without the workers'."""
    cost = costs(few, many)
    cost.pop("workers", None)
    return {
        "turns": few["turns"] + many["turns"],
        "failed": few["failed"] + many["failed"],
        "requests_per_second": round(many["requests_per_second"], 1),
        "chunks_per_second": many["chunks_per_second"],
        "ttft_ms": many["ttft_ms"],
        "between_chunks_ms": many["between_chunks_ms"],
        "us_per_chunk": round(sum(each["us_per_chunk"] for each in cost.values()), 1),
        "ms_per_request": round(sum(each["ms_per_request"] for each in cost.values()), 3),
        "cost": cost,
        "cpu_us_per_chunk_all_in": per(many["cpu_seconds"], many["chunks"], 1e6),
        "rss_mib": {name: round(mib, 1) for name, mib in many["rss_mib"].items()},
        "outcomes": many["outcomes"],
        "render_ms": many["render_ms"],
        "prefill_ms": many["prefill_ms"],
        "generator_share_of_a_core": round(many["generator_cpu_seconds"] / many["seconds"], 3),
        "late_ms": many["late_ms"],
    }


def with_added_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add, to every peer that does both legs, by how much its TTFT exceeds the legs' own in the same run."""
    own = next((row["ttft_ms"] for row in rows if row["name"] == LEGS and not row.get("absent")), None)
    if own is None:
        return rows
    return [
        {**row, "added_ttft_ms": {share: round(row["ttft_ms"][share] - own[share], 2) for share in ("p50", "p99")}}
        if row["does_both_legs"] and not row.get("absent") and row["name"] != LEGS
        else row
        for row in rows
    ]


def is_good(result: dict[str, Any]) -> bool:
    """Say whether kvloop served every turn, and rightly."""
    rows = [row for row in result["peers"] if row["name"].startswith(KVLOOP)]
    return all(
        not row.get("absent") and not row["failed"] and not any(row[key] for key in MUST_BE_ZERO) for row in rows
    )


def as_text(result: dict[str, Any]) -> str:
    """Return the comparison for people."""
    head = ["peer", "chunks/s", "TTFT p50", "p99", "added p50", "p99", "us/chunk", "ms/request", "RSS MiB", "failed"]
    rows = []
    for row in result["peers"]:
        if row.get("absent"):
            continue
        added = row.get("added_ttft_ms", {})
        rss = sum(mib for name, mib in row["rss_mib"].items() if name != "workers")
        rows.append(
            [
                row["name"],
                str(row["chunks_per_second"]),
                f"{row['ttft_ms'].get('p50', 0):.1f}",
                f"{row['ttft_ms'].get('p99', 0):.1f}",
                f"{added['p50']:.1f}" if added else "-",
                f"{added['p99']:.1f}" if added else "-",
                f"{row['us_per_chunk']:.0f}",
                f"{row['ms_per_request']:.2f}",
                f"{rss:.0f}",
                str(row["failed"]),
            ]
        )
    absent = [f"absent: {row['name']}: {row['absent']}" for row in result["peers"] if row.get("absent")]
    remark = (
        f"{result['concurrency']} streams; times in ms, CPU of the peer's own processes; cores {result['cores']};"
        f" system load {result['machine']['load']}"
    )
    return "\n".join([table(head, rows), "", *absent, remark])
