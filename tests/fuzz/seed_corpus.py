"""Make the seed corpus from the recordings: ``python tests/fuzz/seed_corpus.py``. Inputs of former crashes stay."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

from hpack import Encoder

from extproc.splice import raw_value

CORPUS = Path(__file__).parent / "corpus"
RECORDINGS = Path(__file__).parent.parent / "recordings"
MAX_BYTES = 6000
"""Longer recordings teach a fuzzer nothing more, and cost it speed."""

VARIANTS = {"plain", "usage", "logprobs", "choices", "cold", "handle"}

STREAMED, WHOLE = 4, 0
ASKED = 3


def seeds() -> Iterator[tuple[str, bytes]]:
    """Yield (path below the corpus, content)."""
    index = json.loads((RECORDINGS / "index.json").read_text())
    for path in sorted(RECORDINGS.glob("*/*.http-body")):
        name, body = f"{path.parent.name}-{path.stem}", path.read_bytes()
        if path.stem.rpartition("-")[2] not in VARIANTS:
            continue
        if path.parent.name in ("digest", "stock", "derived-0.33", "stream-handle") and len(body) <= MAX_BYTES:
            how = (STREAMED if "-stream-" in path.name else WHOLE) | (0 if path.parent.name == "digest" else ASKED)
            yield f"answer/{name}", bytes((how, 7)) + body
        for handle in list(handles_in(body))[:1]:
            yield f"handle/{name}", bytes((40, 0)) + handle
    for name, body in requests(index):
        yield f"request/{name}", body
    for kind, how in (("request", b"\x02\0"), ("request", b"\x03\0"), ("handle", b"\x28\x02")):
        yield f"{kind}/spelled-{how.hex()}", how + bytes(60)
        yield f"{kind}/spelled-{how.hex()}-at-random", how + Random(0).randbytes(300)
    for name, sent in connections():
        yield f"connection/{name}", bytes((0, 7)) + sent


def handles_in(body: bytes) -> Iterator[bytes]:
    """Yield the text of every handle in a recorded body."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n")]
    for line in lines:
        if b'"kv_transfer_params":{' in line.replace(b" ", b"") and line.startswith(b"{"):
            yield raw_value(line, "kv_transfer_params")


def requests(index: dict[str, dict[str, object]]) -> Iterator[tuple[str, bytes]]:
    """Yield the recorded requests, each kind once, and some that try what no client may."""
    seen = set()
    for name, entry in sorted(index.items()):
        body = json.dumps(entry.get("request"), separators=(",", ":")).encode()
        how = bytes((1 if "chat" not in str(entry.get("path")) else 0, 0))
        shape = (how, *sorted(entry.get("request") or ()))
        if entry.get("request") and shape not in seen and len(body) <= MAX_BYTES:
            seen.add(shape)
            yield name.replace("/", "-"), how + body
    yield "forbidden", b"\0\0" + b'{"model":"m","messages":[],"kv_transfer_params":{"a":[1]},"ec_transfer_params":null}'
    yield "forbidden-nested", b"\0\0" + b'{"vllm_xargs":{"kv_transfer_params":"x","a":1},"vllm_xargs":{"b":2}}'
    yield "forbidden-escaped", b"\1\0" + b'{ "\\u006bv_transfer_params" : {}, "prompt":[1,2],"suffix":"s" }'


def connections() -> Iterator[tuple[str, bytes]]:
    """Yield what a gRPC client sends after the preface: calls, windows, pings, resets, header blocks in pieces."""
    path = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"), ("te", "trailers")]
    encoder = Encoder()
    first, second = encoder.encode(path), encoder.encode(path)
    message = struct.pack("!BL", 0, 5) + b"hello"
    large = struct.pack("!BL", 0, 20_000) + bytes(20_000)
    settings, ack = frame(4, 0, 0, struct.pack("!HL", 4, 40_000)), frame(4, 1, 0, b"")
    opened = settings + ack + frame(1, 4, 1, first)
    yield "call", opened + frame(0, 1, 1, message)
    yield "two-calls", opened + frame(0, 0, 1, message) + frame(1, 4, 3, second) + frame(0, 1, 3, message * 3)
    yield "cut-message", opened + frame(0, 0, 1, message[:3]) + frame(0, 0, 1, message[3:]) + frame(0, 1, 1, b"")
    yield "large", opened + frame(0, 0, 1, large[:16_000]) + frame(0, 0, 1, large[16_000:]) * 3
    yield "windows", opened + frame(8, 0, 0, b"\0\0\xff\xff") + frame(8, 0, 1, b"\0\0\0\x09") + frame(0, 1, 1, message)
    yield (
        "shrunk",
        opened + frame(4, 0, 0, struct.pack("!HL", 4, 3)) + frame(0, 0, 1, message) + frame(8, 0, 1, b"\0\0\0\x02"),
    )
    yield "reset", opened + frame(0, 0, 1, message) + frame(3, 0, 1, b"\0\0\0\x08") + frame(0, 0, 1, message)
    yield "ping", opened + frame(6, 0, 0, b"12345678") + frame(6, 1, 0, b"goodbye\0") + frame(1, 5, 3, second)
    yield "padded", opened + frame(0, 9, 1, b"\x02" + message + b"\0\0")
    pieces = frame(1, 0, 3, second[:2]) + frame(9, 0, 3, second[2:3]) + frame(9, 4, 3, second[3:])
    yield "continued", opened + pieces + frame(0, 1, 3, message)
    yield (
        "odd",
        opened + frame(1, 0x24, 3, b"\0\0\0\0\x10" + second) + frame(7, 0, 0, bytes(8)) + frame(0x77, 1, 2, b"?"),
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Spell one HTTP/2 frame."""
    return struct.pack("!HBBBL", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def main() -> None:
    """Write the corpus."""
    for name, content in seeds():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
