"""``kvloop bench ttft``: time to first token against prompt length on real vLLM workers (CPU), cold and reused.

Each repetition is a conversation of two turns about a fresh document: the first is cold, the second asks one more
question about it, so both have almost the same prompt length. Where a reused turn's time goes comes from its receipt
(render, prefill leg) and from P's own NIXL metrics (transfer); what is left of the prefill leg is compute and queueing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.plots import plot_ttft
from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.tables import table
from workers.demo import MODEL_NAME, cache_directory
from workers.demo.conversation import document, next_messages
from workers.demo.receipts import receipt_value
from workers.models import prepare_smollm2
from workers.stack import Stack, StackOptions
from workers.supervision import StackError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

ANSWER_TOKENS: Final = 16
LENGTHS: Final = (500, 1000, 2000, 4000)
TRANSFER_SECONDS: Final = "vllm:nixl_xfer_time_seconds"
RENDER_REQUESTS: Final = re.compile(r'^http_requests_total\{[^}]*handler="[^"]*/render"[^}]*\} (\S+)$', re.MULTILINE)
METRICS_PATIENCE_SECONDS: Final = 15.0
"""vLLM tells its metrics with the next engine step, or some seconds later when it is idle."""

REQUEST_TIMEOUT_SECONDS: Final = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the TTFT benchmark."""
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"model directory (default: {MODEL_NAME})")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=LENGTHS,
        metavar="TOKENS",
        help="of the documents (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="conversations per length (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result there (PNG or SVG)")


def main(args: argparse.Namespace) -> int:
    """Measure, tell, and return 1 if a second turn was not reused."""
    line = ProgressLine()
    line.tell("preparing the model")
    model = args.model or prepare_smollm2(cache_directory() / MODEL_NAME)
    directory = Path(tempfile.mkdtemp(prefix="kvloop-ttft-"))
    options = StackOptions(
        model=model, run_directory=directory, served_model_name=model.name, prefill={"prefix_caching": False}
    )
    try:
        with Stack(options, lambda progress: line.tell(f"{progress.component}: {progress.state}")) as stack:
            turns = measure(stack, list(args.lengths), args.repeats, line.tell)
    except StackError as error:
        line.end()
        print(f"kvloop bench ttft failed: {error}\nLogs: {directory}")
        return 1
    line.end()
    shutil.rmtree(directory, ignore_errors=True)
    result = {"model": model.name, "turns": turns, "tokenisations": tokenisations(turns), "machine": machine()}
    if args.json is not None:
        write_json(args.json, result)
    if args.plot is not None:
        plot_ttft(result, args.plot)
    print(as_text(result))
    return 0 if all(turn["outcome"] == turn["kind"] for turn in turns) else 1


def measure(stack: Stack, lengths: list[int], repeats: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Play ``repeats`` conversations per length; the medians of each kind of turn, by length, are what is returned."""
    found = []
    for length in lengths:
        pasted = document(length, lambda text: _count_tokens(stack, text))
        played = []
        for repeat in range(repeats):
            tell(f"{length} tokens, conversation {repeat + 1} of {repeats}")
            played += _converse(stack, pasted)
        for kind in ("cold", "reused"):
            turns = [turn for turn in played if turn["kind"] == kind]
            found.append(median_turn(turns))
    return found


def median_turn(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the turn with the median TTFT (its parts belong together), and the lowest and highest TTFT."""
    ordered = sorted(turns, key=lambda turn: float(turn["ttft_ms"]))
    spread = {"lowest_ttft_ms": ordered[0]["ttft_ms"], "highest_ttft_ms": ordered[-1]["ttft_ms"], "repeats": len(turns)}
    return {**ordered[len(ordered) // 2], **spread}


def tokenisations(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return how often a worker tokenised per turn, by kind.

    A turn with something kept is rendered once, and both legs get the ids; any other is tokenised by P's prefill, whose ids
    go to D. (On simulated workers, which count it, the gateway tests hold this to be so.)
    """
    counted: dict[str, list[int]] = {}
    for turn in turns:
        counted.setdefault(turn["kind"], []).append(turn["renders"] + (turn["render_ms"] is None))
    return {kind: sum(counts) / len(counts) for kind, counts in counted.items()}


def _converse(stack: Stack, pasted: str) -> list[dict[str, Any]]:
    name = f"ttft-{secrets.token_hex(4)}"
    turns = []
    answers: list[str] = []
    for kind in ("cold", "reused"):
        messages = [message.as_json() for message in next_messages(pasted, answers)]
        turn, said = _turn(stack, name, messages)
        turns.append({"kind": kind, **turn})
        answers.append(said)
        stack.check()
    return turns


def _turn(stack: Stack, name: str, messages: list[dict[str, str]]) -> tuple[dict[str, Any], str]:
    before = _worker_counters(stack)
    body = {
        "model": stack.options.served_model_name,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": name,
    }
    receipt, first_seconds, events = _stream(stack, name, body)
    said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    render_ms, prefill_ms = (_number(receipt_value(receipt, key)) for key in ("render_ms", "prefill_ms"))
    reads = receipt_value(receipt, "outcome") in {"reused", "partial"}
    after = _worker_counters(stack, transfers=before["transfers"] + reads)
    transfer_ms = (after["transfer_seconds"] - before["transfer_seconds"]) * 1000
    ttft_ms = first_seconds * 1000
    turn = {
        "outcome": receipt_value(receipt, "outcome"),
        "prompt_tokens": events[-1]["usage"]["prompt_tokens"],
        "reused_tokens": int(receipt_value(receipt, "reused") or 0),
        "ttft_ms": round(ttft_ms, 1),
        "render_ms": render_ms,
        "prefill_ms": prefill_ms,
        "transfer_ms": round(transfer_ms, 2) if after["transfers"] > before["transfers"] else None,
        "compute_ms": round((prefill_ms or 0) - transfer_ms, 1),
        "rest_ms": round(ttft_ms - (render_ms or 0) - (prefill_ms or 0), 1),
        "renders": int(after["renders"] - before["renders"]),
    }
    return turn, said


def _stream(stack: Stack, name: str, body: dict[str, Any]) -> tuple[str, float, list[dict[str, Any]]]:
    """Post a streamed turn; return its receipt, the seconds to its first text, and its events."""
    connection = http.client.HTTPConnection(stack.base_url.removeprefix("http://"), timeout=REQUEST_TIMEOUT_SECONDS)
    headers = {"content-type": "application/json", "x-conversation-id": name}
    with contextlib.closing(connection):
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise StackError(f"a turn was answered with {response.status}: {response.read()[:300]!r}")
        first: float | None = None
        events = []
        for line in response:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                if first is None and any(choice["delta"].get("content") for choice in events[-1]["choices"]):
                    first = time.perf_counter() - started
        if first is None:
            raise StackError("a turn's stream held no text")
        return response.headers.get("x-kvloop-receipt", ""), first, events


def _worker_counters(stack: Stack, transfers: float = 0) -> dict[str, float]:
    """Return P's transfer time and count, waiting a while for ``transfers`` of them, and how often it rendered."""
    deadline = time.monotonic() + METRICS_PATIENCE_SECONDS
    while True:
        metrics = stack.metrics("prefill")
        seen = metrics.get(f"{TRANSFER_SECONDS}_count", 0.0)
        if seen >= transfers or time.monotonic() > deadline:
            return {
                "transfers": seen,
                "transfer_seconds": metrics.get(f"{TRANSFER_SECONDS}_sum", 0.0),
                "renders": _renders(stack),
            }
        time.sleep(0.5)


def _renders(stack: Stack) -> float:
    """Return how many render requests P has answered, by its own count."""
    text = stack.request("GET", stack.url("prefill"), "/metrics").text
    return sum(float(count) for count in RENDER_REQUESTS.findall(text))


def _count_tokens(stack: Stack, text: str) -> int:
    body = {"model": stack.options.served_model_name, "prompt": text, "add_special_tokens": False}
    return int(json.loads(stack.request("POST", stack.url("prefill"), "/tokenize", body=body).text)["count"])


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def as_text(result: dict[str, Any]) -> str:
    """Return the result for people."""
    head = [
        "turn",
        "prompt",
        "reused",
        "TTFT ms",
        "lowest",
        "highest",
        "render",
        "prefill leg",
        "of it transfer",
        "rest",
    ]
    rows = [
        [
            turn["kind"],
            str(turn["prompt_tokens"]),
            str(turn["reused_tokens"]),
            *(
                "-" if turn[key] is None else f"{turn[key]:.0f}"
                for key in (
                    "ttft_ms",
                    "lowest_ttft_ms",
                    "highest_ttft_ms",
                    "render_ms",
                    "prefill_ms",
                    "transfer_ms",
                    "rest_ms",
                )
            ),
        ]
        for turn in result["turns"]
    ]
    counts = ", ".join(f"{kind} {count:g}" for kind, count in result["tokenisations"].items())
    return f"{table(head, rows)}\n\ntokenisations per turn: {counts}; system load {result['machine']['load']}"
