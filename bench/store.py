"""``kvloop bench store``: what kept conversations cost, and what a very large handle does to everybody else.

One event loop serves all streams, so the longest moment it spends on one message is what any other stream may have to
wait. The largest messages are handles: a decode worker tells one block id per KV block, in one event.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from bench.processes import MEBIBYTE, usage_of
from bench.progress import ProgressLine
from bench.results import machine, write_json
from bench.statistics import percentiles
from bench.tables import table
from extproc import proof
from extproc.handle import read_publication
from extproc.identity import ConversationKey
from extproc.store import MemoryStore, StoredTurn
from extproc.turn import StreamedTurn, Watch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

BLOCK_TOKENS: Final = 16
PIECE_BYTES: Final = 4096
KIBIBYTE: Final = 1024
MILLISECOND: Final = 1e3
MICROSECOND: Final = 1e6
STORE_SIZES: Final = (100, 1_000, 10_000, 100_000)
OPERATIONS: Final = 2_000
HANDLE_TOKENS: Final = (131_072, 524_288, 1_048_576, 2_097_152, 8_388_608)
"""The third makes an event of about a megabyte."""

SHARED_TOKENS: Final = (1_024, 32_768, 131_072)
REPEATS: Final = 5
NO_LIMIT: Final = 1 << 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the store benchmark."""
    parser.add_argument("--conversations", type=int, default=10_000, help="to hold at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of each of them (default: %(default)s)")
    parser.add_argument(
        "--store-url", metavar="URL", help="also measure this Redis or Valkey (redis://127.0.0.1:6379/0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")


def main(args: argparse.Namespace) -> int:
    """Measure, tell."""
    line = ProgressLine()
    result = {
        "memory": memory(args.conversations, args.tokens, line.tell),
        "operations": [operations(size) for size in STORE_SIZES],
        "handles": [large_handle(tokens) for tokens in HANDLE_TOKENS],
        "machine": machine(),
    }
    if args.store_url is not None:
        from bench import shared_store  # noqa: PLC0415 - redis-py is an extra

        line.tell("store: puts and takes on the shared one")
        result["shared"] = shared_store.measure(args.store_url, SHARED_TOKENS, _turn, _key)
    line.end()
    if args.json is not None:
        write_json(args.json, result)
    print(as_text(result))
    return 0


def memory(conversations: int, tokens: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return what so many kept conversations of so many tokens cost, by the process' size and by the store's own count."""
    store = MemoryStore(max_conversations=NO_LIMIT, max_bytes=NO_LIMIT)
    gc.collect()
    before = usage_of(["self"]).rss_mib
    for number in range(conversations):
        store.put(_key(number), _turn(tokens, number))
        if number % 500 == 0:
            tell(f"store: {number}/{conversations} conversations of {tokens} tokens")
    after = usage_of(["self"]).rss_mib
    return {
        "conversations": conversations,
        "tokens": tokens,
        "rss_mib": round(after - before, 1),
        "rss_kib_per_conversation": round((after - before) * KIBIBYTE / conversations, 2),
        "counted_kib_per_conversation": round(store.size_bytes / KIBIBYTE / conversations, 2),
    }


def operations(size: int) -> dict[str, Any]:
    """Return how long store operations take with ``size`` conversations kept, in microseconds."""
    store = MemoryStore(max_conversations=NO_LIMIT, max_bytes=NO_LIMIT)
    turn = _turn(1024, 0)
    for number in range(size):
        store.put(_key(number), turn)
    keys = [_key(number * 7919 % size) for number in range(OPERATIONS)]
    gc.collect()
    return {
        "conversations": size,
        "take_us": _median_us(store.take, keys),
        "put_us": _median_us(lambda key: store.put(key, turn), keys),
        "expire_us": _median_us(lambda _: store.expire(0.0), keys),
    }


def large_handle(tokens: int) -> dict[str, Any]:
    """Return what an event with a handle of so many tokens costs when it arrives in small pieces, in milliseconds."""
    event = b"data: " + orjson.dumps({"choices": [], "kv_transfer_params": _params(tokens, 0)}) + b"\n\n"
    totals: list[float] = []
    longest: list[float] = []
    for _ in range(REPEATS):
        steps = list(_steps(event))
        totals.append(sum(steps))
        longest.append(max(steps))
    return {
        "tokens": tokens,
        "event_bytes": len(event),
        "total_ms": round(min(totals) * MILLISECOND, 2),
        "ms_per_mib": round(min(totals) * MILLISECOND / (len(event) / MEBIBYTE), 2),
        "longest_step_ms": round(min(longest) * MILLISECOND, 2),
    }


def _steps(event: bytes) -> Iterator[float]:
    """Take an event in piece by piece and keep its handle; yield the seconds of each uninterrupted step."""
    watch = Watch(learn_token_ids=False, hide_token_ids=False, event_max_bytes=NO_LIMIT, response_max_bytes=NO_LIMIT)
    fold = StreamedTurn(watch)
    store = MemoryStore(max_conversations=NO_LIMIT, max_bytes=NO_LIMIT)
    for start in range(0, len(event), PIECE_BYTES):
        began = time.perf_counter()
        fold.feed(event[start : start + PIECE_BYTES], end=False)
        if fold.learned.published is not None:
            store.put(_key(0), _stored(fold.learned.published))
        yield time.perf_counter() - began


def _turn(tokens: int, number: int) -> StoredTurn:
    return _stored(orjson.dumps(_params(tokens, number)))


def _stored(published: bytes) -> StoredTurn:
    publication = read_publication(published)
    assert publication.sequence is not None  # noqa: S101 - _params gives one
    return StoredTurn(publication.handle, publication.sequence, publication.block_size_tokens, "sim", 1e9)


def _params(tokens: int, number: int) -> dict[str, Any]:
    """Return transfer parameters as a decode worker with the plugin publishes them."""
    first = number * 31 % 60_000
    digest = proof.Sequence(tokens, bytes(16) * (tokens // proof.CHUNK_TOKENS), (7,) * (tokens % proof.CHUNK_TOKENS))
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(first, first + -(-tokens // BLOCK_TOKENS)))],
        "remote_engine_id": f"8b88bf27-8cc6-49d6-9401-{number % 8:012x}",
        "remote_request_id": f"chatcmpl-a397ba302b3a2119-{number:08x}",
        "remote_host": "10.0.0.7",
        "remote_port": 5600 + number % 8,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 1994.820642352,
        "transfer_mode": "pull",
        "kvloop_digest": {**proof.to_json(digest), "block_size": BLOCK_TOKENS},
    }


def _key(number: int) -> ConversationKey:
    return ConversationKey(number.to_bytes(16, "big"))


def _median_us(act: Callable[[ConversationKey], Any], keys: list[ConversationKey]) -> float:
    seconds = []
    for key in keys:
        began = time.perf_counter()
        act(key)
        seconds.append(time.perf_counter() - began)
    return percentiles(seconds, scale=MICROSECOND)["p50"]


def as_text(result: dict[str, Any]) -> str:
    """Return the result for people."""
    kept = result["memory"]
    operated = [
        [f"{row['conversations']:,}", f"{row['take_us']:.2f}", f"{row['put_us']:.2f}", f"{row['expire_us']:.2f}"]
        for row in result["operations"]
    ]
    handled = [
        [f"{row['tokens']:,}", f"{row['event_bytes']:,}"]
        + [f"{row[key]:.2f}" for key in ("total_ms", "ms_per_mib", "longest_step_ms")]
        for row in result["handles"]
    ]
    size = (
        f"{kept['conversations']:,} conversations of {kept['tokens']:,} tokens: {kept['rss_mib']:.0f} MiB,"
        f" {kept['rss_kib_per_conversation']:.1f} KiB each (the store counts"
        f" {kept['counted_kib_per_conversation']:.1f})"
    )
    times = table(["conversations kept", "take us", "put us", "expire us"], operated)
    handles = table(["handle, tokens", "event, bytes", "total ms", "ms per MiB", "longest step ms"], handled)
    return "\n\n".join([size, times, handles, *_shared_as_text(result)])


def _shared_as_text(result: dict[str, Any]) -> list[str]:
    if "shared" not in result:
        return []
    from bench import shared_store  # noqa: PLC0415 - redis-py is an extra

    heads = ["kept, tokens", "at once", "put p50 ms", "p99", "take p50 ms", "p99", "CPU us per turn"]
    return [table(heads, shared_store.rows(result["shared"]))]
