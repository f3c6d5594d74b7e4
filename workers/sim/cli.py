"""``kvloop sim prefill|decode|fleet``: simulated workers on given ports, until interrupted."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.errors import ConfigError
from workers.sim.calibration import as_text, fit, read_legs
from workers.sim.engine import EngineSettings
from workers.sim.peers import Registry
from workers.sim.settings import Timing, WorkerSettings
from workers.sim.text import Model
from workers.sim.worker import SimWorker

if TYPE_CHECKING:
    import argparse

    from workers.sim.settings import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloop sim``."""
    parser.add_argument("what", choices=("prefill", "decode", "fleet", "calibrate"))
    parser.add_argument(
        "demos",
        type=Path,
        nargs="*",
        metavar="RUN.json",
        help="calibrate: fit the timing to these real runs (kvloop demo or bench ttft, --json)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--advertised-host", help="the host in handles, where peers read KV (default: --host)")
    parser.add_argument(
        "--port", type=int, default=8100, help="first port; a fleet takes the following ones, too (0: free ones)"
    )
    parser.add_argument("--prefill-workers", type=int, default=1, help="in a fleet")
    parser.add_argument("--decode-workers", type=int, default=1, help="in a fleet")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines behind each worker's API")
    parser.add_argument("--served-model-name", default="sim")
    parser.add_argument("--vllm-version", choices=("0.32.0", "0.33.0"), default="0.32.0")
    parser.add_argument("--plugin", action="store_true", help="behave as with kvloop's vLLM plugin, all its parts")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument("--blocks", type=int, default=4096, help="KV blocks per worker")
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--decoder-ttl-seconds", type=float, default=480.0)
    parser.add_argument("--lease-seconds", type=float, default=30.0)
    parser.add_argument("--prefill-tokens-per-second", type=float)
    parser.add_argument("--attention-pairs-per-second", type=float, help="prefill's quadratic term")
    parser.add_argument("--decode-tokens-per-second", type=float)
    parser.add_argument("--tokenise-tokens-per-second", type=float)
    parser.add_argument("--transfer-bytes-per-second", type=float)
    parser.add_argument(
        "--kv-bytes-per-token", type=int, default=Timing().kv_bytes_per_token, help="(default: %(default)s)"
    )
    parser.add_argument("--request-overhead-seconds", type=float, default=0.0)
    parser.add_argument("--mean-answer-tokens", type=int, default=24)


def main(args: argparse.Namespace) -> int:
    """Run the workers until SIGINT or SIGTERM, or calibrate."""
    if args.what == "calibrate":
        return _calibrate(args)
    if args.demos:
        raise ConfigError(f"only calibrate reads files; leave {args.demos[0]} out")
    counts: dict[Role, int]
    if args.what == "fleet":
        counts = {"prefill": args.prefill_workers, "decode": args.decode_workers}
    else:
        counts = {args.what: 1}
    roles: list[Role] = [role for role, count in counts.items() for _ in range(count)]
    asyncio.run(_serve([_settings(role, args) for role in roles], args.host, args.port))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    if not args.demos:
        raise ConfigError(
            "nothing to calibrate with: name one or more files that kvloop demo or bench ttft wrote with --json"
        )
    legs = []
    for path in args.demos:
        try:
            legs += read_legs(json.loads(path.read_bytes()))
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not what kvloop demo or bench ttft writes with --json: {error}") from error
    print(as_text(fit(legs, kv_bytes_per_token=args.kv_bytes_per_token), legs))  # noqa: T201 - what was asked for
    return 0


def _settings(role: Role, args: argparse.Namespace) -> WorkerSettings:
    return WorkerSettings(
        role=role,
        model_name=args.served_model_name,
        engine=EngineSettings(
            block_count=args.blocks,
            block_size=args.block_size,
            max_model_len=min(args.max_model_len, args.blocks * args.block_size),
            prefix_caching=not args.no_prefix_caching,
            decoder_ttl_seconds=args.decoder_ttl_seconds,
            lease_seconds=args.lease_seconds,
            repaired=args.plugin,
        ),
        model=Model(mean_answer_tokens=args.mean_answer_tokens),
        timing=Timing(
            prefill_tokens_per_second=args.prefill_tokens_per_second,
            attention_pairs_per_second=args.attention_pairs_per_second,
            tokenise_tokens_per_second=args.tokenise_tokens_per_second,
            transfer_bytes_per_second=args.transfer_bytes_per_second,
            kv_bytes_per_token=args.kv_bytes_per_token,
            decode_tokens_per_second=args.decode_tokens_per_second,
            request_overhead_seconds=args.request_overhead_seconds,
        ),
        vllm_version=args.vllm_version,
        data_parallel_size=args.data_parallel_size,
        streams_handles=args.plugin,
        digests_handles=args.plugin,
        advertised_host=args.advertised_host or args.host,
    )


async def _serve(all_settings: list[WorkerSettings], host: str, first_port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = Registry()
    ports = [first_port and first_port + index for index in range(len(all_settings))]
    workers = [
        SimWorker(settings, registry, host=host, port=port) for settings, port in zip(all_settings, ports, strict=True)
    ]
    try:
        for worker in workers:
            try:
                await worker.start()
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {worker.address}: {error.strerror}; choose another --port"
                ) from error
            print(f"{worker.settings.role} http://{worker.address}", flush=True)  # noqa: T201 - what was asked for
        await stop.wait()
    finally:
        for worker in workers:
            await worker.stop()
        await registry.close()
