"""The benchmarks' pictures. Each takes a result as it stands in the JSON file, so a picture can be drawn again later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

WIDTH_INCHES, HEIGHT_INCHES, DPI = 10.0, 4.2, 110
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#97bbf5")


def plot_load(result: dict[str, Any], path: Path) -> None:
    """Draw one load run: TTFT of all turns, chunks per second over time, CPU by process."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    first = sorted(1000 * seconds for seconds in result["first_token_seconds"])
    left.plot(first, [100 * (index + 1) / len(first) for index in range(len(first))], color=COLOURS[0])
    left.set(xlabel="time to first token, ms", ylabel="% of turns", xscale="log")
    middle.plot(range(1, len(result["rates"]) + 1), result["rates"], color=COLOURS[1])
    middle.set(xlabel="second", ylabel="chunks per second", ylim=(0, None))
    share = {name: 100 * cpu / result["seconds"] for name, cpu in result["cpu_seconds"].items()}
    share["load generator"] = 100 * result["generator"]["cpu_share_of_a_core"]
    right.barh(list(share), list(share.values()), color=COLOURS[2])
    right.set(xlabel="% of a core")
    _finish(figure, f"kvloop bench load: {result['profile'] or result['trace']}", path)


def plot_peers(result: dict[str, Any], path: Path) -> None:
    """Draw all peers of one run side by side: TTFT, CPU per chunk, CPU per request."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    peers = [peer for peer in result["peers"] if not peer.get("absent")]
    names = [peer["name"] for peer in peers]
    for offset, share in ((-0.2, "p50"), (0.2, "p99")):
        places = [index + offset for index in range(len(peers))]
        left.barh(places, [peer["ttft_ms"].get(share, 0) for peer in peers], height=0.38, label=share)
    left.set(xlabel=f"time to first token at {result['concurrency']} streams, ms")
    left.set_yticks(range(len(peers)), names)
    left.legend()
    middle.barh(names, [peer["us_per_chunk"] for peer in peers], color=COLOURS[1])
    middle.set(xlabel="CPU per chunk, us", yticklabels=[])
    right.barh(names, [peer["ms_per_request"] for peer in peers], color=COLOURS[2])
    right.set(xlabel="CPU per request, ms", yticklabels=[])
    for axes in (left, middle, right):
        axes.invert_yaxis()
    _finish(figure, "kvloop bench peers", path)


def plot_ttft(result: dict[str, Any], path: Path) -> None:
    """Draw TTFT against prompt length, cold and reused, and where the reused turn's time goes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    for colour, kind in zip(COLOURS, ("cold", "reused"), strict=False):
        points = [(turn["prompt_tokens"], turn["ttft_ms"] / 1000) for turn in result["turns"] if turn["kind"] == kind]
        left.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=kind)
    left.set(xlabel="prompt, tokens", ylabel="time to first token, s", ylim=(0, None), xlim=(0, None))
    left.legend()
    reused = sorted((turn for turn in result["turns"] if turn["kind"] == "reused"), key=lambda t: t["prompt_tokens"])
    labels = [str(turn["prompt_tokens"]) for turn in reused]
    bottom = [0.0] * len(reused)
    for colour, part in zip(COLOURS, ("render_ms", "transfer_ms", "compute_ms", "rest_ms"), strict=False):
        heights = [turn.get(part) or 0.0 for turn in reused]
        right.bar(labels, heights, bottom=bottom, color=colour, label=part.removesuffix("_ms"))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.set(xlabel="prompt of a reused turn, tokens", ylabel="ms")
    right.legend()
    _finish(figure, "kvloop bench ttft: SmolLM2-135M, vLLM on CPU", path)


def plot_retention(result: dict[str, Any], path: Path) -> None:
    """Draw TTFT p50 of later turns and the pinned share, by load and policy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    loads = list(dict.fromkeys(row["load"] for row in result["rows"]))
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    for number, policy in enumerate(policies):
        rows = [row for row in result["rows"] if row["policy"] == policy]
        places = [index + (number - len(policies) / 2) * 0.13 for index in range(len(loads))]
        colour = COLOURS[number % len(COLOURS)]
        left.bar(places, [row["ttft_ms"]["p50"] for row in rows], width=0.12, label=policy, color=colour)
        right.bar(places, [100 * row["pinned_share"]["mean"] for row in rows], width=0.12, color=colour)
    left.set(ylabel="time to first token from turn 2 on, p50, ms", yscale="log")
    right.set(ylabel="decode workers' memory pinned, mean, %")
    for axes in (left, right):
        axes.set_xticks(range(len(loads)), loads, rotation=15)
    left.legend(fontsize="small")
    _finish(figure, "kvloop bench retention (simulated time)", path)


def _finish(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
