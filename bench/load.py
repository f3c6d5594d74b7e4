"""``kvloop bench load``: traffic as a profile or a trace describes it, through real Envoy and ext_proc.

What one request and what one chunk cost is told apart by two runs: first the same prompts with the shortest answers, then
the profile itself. What is the same in both is the request's; what grows with the answers is the chunks'.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from bench.plots import plot_load
from bench.processes import usable_cores
from bench.profile import QUANTITIES, read_profile, read_trace, shipped_profiles
from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.run import run_traffic
from bench.site import Front, Site, SiteOptions, envoy_stats, get, kvloop
from bench.statistics import two_costs
from bench.tables import table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SHORT_ANSWER_TOKENS: Final = 2
SHORT_GAP_SECONDS: Final = 0.1
SHORT_CONCURRENCY: Final = 4
SHORT_RUN_SHARE: Final = 0.3
"""Length of the first run (short answers), of the profile's own."""

WARM_UP_TURNS: Final = 8
AFTER_TTL_SECONDS: Final = 10_000.0
STREAM_MESSAGES: Final = "http.main.ext_proc.kvloop.stream_msgs_sent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the load benchmark."""
    names = ", ".join(shipped_profiles())
    parser.add_argument("--profile", default="chat", help=f"{names}, or a JSON file (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="play a recorded trace (JSON lines) instead")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long turns are sent (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiply the profile's arrivals (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill-workers", type=int, default=1)
    parser.add_argument("--decode-workers", type=int, default=2)
    parser.add_argument("--stock", action="store_true", help="decode workers without the plugin's digest")
    parser.add_argument("--prefill-tokens-per-second", type=float, default=20_000.0)
    parser.add_argument("--decode-tokens-per-second", type=float, default=50.0, help="per sequence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result there (PNG or SVG)")


def main(args: argparse.Namespace) -> int:
    """Run, tell, and return 1 if a turn failed or attended to wrong KV, or a pin leaked."""
    profile = None if args.trace else scaled(profile_json(args.profile), args.scale)
    if args.trace:
        read_trace(args.trace.read_bytes().splitlines())  # complains now
    options = SiteOptions(
        prefill_workers=args.prefill_workers,
        decode_workers=args.decode_workers,
        plugin=not args.stock,
        prefill_tokens_per_second=args.prefill_tokens_per_second,
        decode_tokens_per_second=args.decode_tokens_per_second,
        sim_options=() if not args.stock else STOCK_OPTIONS,
    )
    line = ProgressLine()
    with tempfile.TemporaryDirectory(prefix="kvloop-bench-") as directory, Site(Path(directory), options) as site:
        front = kvloop(site)
        site.put_in_front(front.components, front.is_ready)
        run = Load(site, front, args.seconds, args.seed, line.tell)
        measured = run.trace(str(args.trace)) if profile is None else run.profile(profile)
    line.end()
    result = {
        "profile": args.profile if profile is not None else None,
        "trace": str(args.trace) if args.trace else None,
        "digest_from_decode_workers": not args.stock,
        "cores": {"proxies": sorted(site.proxy_cores), "load and workers": sorted(site.load_cores)},
        **measured,
        "machine": machine(),
    }
    if args.plot is not None:
        plot_load(result, args.plot)
    result.pop("first_token_seconds")
    if args.json is not None:
        write_json(args.json, result)
    print(as_text(result))
    return 0 if is_good(result) else 1


STOCK_OPTIONS: Final = ("--vllm-version", "0.33.0")
"""Of decode workers that stream their handles by themselves, without a digest."""


@dataclass(slots=True)
class Load:
    """The runs of one load benchmark against one front."""

    site: Site
    front: Front
    seconds: float
    seed: int
    tell: Callable[[str], None]

    def profile(self, profile: dict[str, Any]) -> dict[str, Any]:
        """Run a profile: warm up, short answers, then the profile itself."""
        self._run(profile, seconds=3.0, seed=self.seed + 2, max_turns=WARM_UP_TURNS, what="warm-up")
        short = with_short_answers(profile)
        few = self._run(
            short, seconds=max(2.0, self.seconds * SHORT_RUN_SHARE), seed=self.seed + 1, what="short answers"
        )
        many = self._observed(lambda: self._run(profile, seconds=self.seconds, seed=self.seed, what="profile"))
        return {**many, "cost": costs(few, many)}

    def trace(self, path: str) -> dict[str, Any]:
        """Play a trace."""
        return self._observed(lambda: self._run(None, seconds=self.seconds, seed=self.seed, what="trace", trace=path))

    def _observed(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run, and add what Envoy, ext_proc and the workers have to say about it."""
        messages = envoy_stats(self.front.admin_port, STREAM_MESSAGES).get(STREAM_MESSAGES, 0)
        before = {key: self.site.total(key) for key in COUNTED}
        measured = run()
        sent = envoy_stats(self.front.admin_port, STREAM_MESSAGES).get(STREAM_MESSAGES, 0) - messages
        kept = kept_turns(self.front.extproc_admin_port)
        pins = self.site.total("live_pins")
        counted = {key: self.site.total(key) - before[key] for key in COUNTED}
        self.site.skip(AFTER_TTL_SECONDS)
        later = measured["later_turns"]
        reused = sum(measured["outcomes"].get(outcome, 0) for outcome in ("reused", "partial"))
        return {
            **measured,
            **counted,
            "ext_proc_messages": sent,
            "reuse_rate": round(reused / later, 4) if later else None,
            "pins": pins,
            "kept_turns": kept,
            "leaked_pins": pins - kept,
            "pins_after_ttl": self.site.total("live_pins"),
            "cpu_us_per_chunk_all_in": per(measured["cpu_seconds"], measured["chunks"], 1e6),
            "cpu_ms_per_request_all_in": per(measured["cpu_seconds"], measured["turns"], 1e3),
            "generator": generator_of(measured),
        }

    def _run(self, profile: dict[str, Any] | None, *, what: str, **options: Any) -> dict[str, Any]:
        return run_traffic(
            self.site, self.front.port, profile=profile, tell=lambda text: self.tell(f"{what}: {text}"), **options
        )


COUNTED: Final = ("wrong_kv_turns", "handles_used_twice", "handles_read", "handles_released", "tokenisations")


def profile_json(name: str) -> dict[str, Any]:
    """Return a profile as the JSON it is written in, checked; raises ``ConfigError``."""
    profile = read_profile(name)
    quantities = {key: _spelt(profile.quantities[key]) for key in QUANTITIES}
    arrivals = {"conversations_per_second": profile.conversations_per_second, "concurrency": profile.concurrency}
    return quantities | {key: value for key, value in arrivals.items() if value is not None}


def with_short_answers(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the profile's prompts with the shortest answers, a few conversations at a time, so that turns are many."""
    prompts = {key: profile[key] for key in ("turns", "first_prompt_tokens", "next_prompt_tokens")}
    answers = {"answer_tokens": {"constant": SHORT_ANSWER_TOKENS}, "gap_seconds": {"constant": SHORT_GAP_SECONDS}}
    return {**prompts, **answers, "concurrency": SHORT_CONCURRENCY}


def scaled(profile: dict[str, Any], scale: float) -> dict[str, Any]:
    """Return the profile with more or fewer arrivals."""
    rate, places = profile.get("conversations_per_second"), profile.get("concurrency")
    if rate is not None:
        return {**profile, "conversations_per_second": rate * scale}
    return {**profile, "concurrency": max(1, round((places or 1) * scale))}


def costs(few: dict[str, Any], many: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each process' CPU milliseconds per request and microseconds per chunk, from two runs (module docstring).

    Empty when one of them was too short to tell.
    """
    found: dict[str, dict[str, float]] = {}
    if few["turns"] * many["chunks"] == many["turns"] * few["chunks"]:
        return found
    for name, cpu_seconds in many["cpu_seconds"].items():
        first = (few["cpu_seconds"][name], few["turns"], few["chunks"])
        request, chunk = two_costs(first, (cpu_seconds, many["turns"], many["chunks"]))
        found[name] = {"ms_per_request": round(request * 1e3, 3), "us_per_chunk": round(chunk * 1e6, 1)}
    return found


def per(cpu_seconds: dict[str, float], count: int, scale: float) -> dict[str, float]:
    """Return CPU time by process over a count, scaled."""
    return {name: round(seconds / max(1, count) * scale, 2) for name, seconds in cpu_seconds.items()}


def generator_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Return what the load generator itself used, and how late it was."""
    return {
        "cpu_seconds": round(measured["generator_cpu_seconds"], 3),
        "cpu_share_of_a_core": round(measured["generator_cpu_seconds"] / measured["seconds"], 3),
        "late_ms": measured["late_ms"],
    }


def kept_turns(admin_port: int) -> int:
    """Return how many handles ext_proc keeps."""
    for line in get(admin_port, "/metrics")[1].splitlines():
        if line.startswith("kvloop_kept_turns "):
            return int(float(line.split()[1]))
    return 0


def is_good(result: dict[str, Any]) -> bool:
    """Say whether nothing happened that must not."""
    zeros = ("failed", "wrong_kv_turns", "handles_used_twice", "leaked_pins", "pins_after_ttl")
    return result["turns"] > 0 and not any(result[key] for key in zeros)


def as_text(result: dict[str, Any]) -> str:
    """Return the result for people."""
    ttft, gaps, late = result["ttft_ms"], result["between_chunks_ms"], result["generator"]["late_ms"]
    cost = result.get("cost")
    rows = [
        [
            name,
            f"{cost[name]['us_per_chunk']:.1f}" if cost else "-",
            f"{cost[name]['ms_per_request']:.2f}" if cost else "-",
            f"{result['cpu_us_per_chunk_all_in'][name]:.1f}",
            f"{100 * result['cpu_seconds'][name] / result['seconds']:.0f} %",
            f"{result['rss_mib'][name]:.0f}",
        ]
        for name in result["cpu_seconds"]
    ]
    lines = (
        f"{result['turns']} turns in {result['seconds']:.1f} s: {result['requests_per_second']:.1f} requests/s,"
        f" {result['chunks_per_second']} chunks/s, {result['failed']} failed\n"
        f"TTFT p50 {ttft.get('p50')} ms, p99 {ttft.get('p99')} ms;"
        f" between chunks p50 {gaps.get('p50')} ms, p99 {gaps.get('p99')} ms\n"
        f"reuse rate {result['reuse_rate']}, outcomes {result['outcomes']}\n"
        f"wrong-KV turns {result['wrong_kv_turns']}, handles used twice {result['handles_used_twice']},"
        f" leaked pins {result['leaked_pins']}, pins after the TTL {result['pins_after_ttl']}\n"
    )
    head = ["process", "us/chunk", "ms/request", "us/chunk all in", "of a core", "RSS MiB"]
    return (
        f"{lines}\n{table(head, rows)}\n\n"
        f"load generator: {100 * result['generator']['cpu_share_of_a_core']:.0f} % of a core,"
        f" late by p50 {late.get('p50')} ms, p99 {late.get('p99')} ms; cores {result['cores']},"
        f" of {len(usable_cores())}; system load {result['machine']['load']}"
    )


def _spelt(quantity: Any) -> dict[str, Any]:
    values = list(quantity.values) if len(quantity.values) > 1 else quantity.values[0]
    bound = {} if quantity.maximum == float("inf") else {"max": quantity.maximum}
    return dict(orjson.loads(orjson.dumps({quantity.kind: values, **bound})))
