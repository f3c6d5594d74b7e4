"""``kvloop top``: a live view of replicas' engines, outcomes, times and conversations, from their admin ports."""

from __future__ import annotations

import argparse  # noqa: TC003 - the CLI contract of every command module
import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from extproc.errors import ConfigError
from extproc.settings import GatewaySettings
from extproc.top_picture import Sample, picture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.top_picture import Series

_PATIENCE_SECONDS: Final = 3.0
_WINDOW_SECONDS: Final = 10.0
"""Rates and times are those of the last so many seconds."""

_MOST_ROWS: Final = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "admin",
        nargs="*",
        metavar="HOST:PORT",
        help="admin addresses of the replicas (default: KVLOOP_ADMIN_LISTEN, else its default)",
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument(
        "--once", action="store_true", help="look twice, an interval apart, tell what came between and end"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per look instead of a picture")


def main(args: argparse.Namespace) -> int:
    """Show the view until q or Ctrl-C; returns the exit status."""
    if not 0.1 <= args.interval <= 3600:  # noqa: PLR2004 - said in words below
        raise ConfigError("--interval is between 0.1 and 3600 seconds")
    replicas = args.admin or [_reachable(GatewaySettings().admin_listen)]
    for replica in replicas:
        if not replica.rpartition(":")[2].isdecimal():
            raise ConfigError(f"{replica} is no address: HOST:PORT of a replica's admin port is wanted")
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_watch(replicas, args.interval, once=args.once, as_json=args.json))
    return 0


def _reachable(listen: str) -> str:
    """Return where a listening address is reached from this machine: listening everywhere is listening here."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else listen


async def _watch(replicas: Sequence[str], interval: float, *, once: bool, as_json: bool) -> int:
    show = _print_json if as_json else None
    if show is None:
        _check_terminal(once=once)
        from extproc.top_screen import Screen  # noqa: PLC0415 - JSON needs no rich
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)) as session:
        first = await _look(session, replicas)
        if all(sample.error for sample in first):
            raise ConfigError(_nobody(first))
        if once:
            await asyncio.sleep(interval)
            seen = _seen([first, await _look(session, replicas)])
            _print_json(seen) if as_json else Screen.print_once(seen)
            return 0
        history = deque([first])
        if as_json:
            while True:
                await asyncio.sleep(interval)
                _remember(history, await _look(session, replicas))
                _print_json(_seen(history))
        with Screen(interval) as screen, _keys() as quits:
            while not quits.is_set():
                screen.show(_seen(history))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await quits.wait()
                _remember(history, await _look(session, replicas))
    return 0


def _check_terminal(*, once: bool) -> None:
    try:
        import rich  # noqa: F401, PLC0415 - an extra, wanted for the picture alone
    except ImportError:
        raise ConfigError("the picture needs rich: pip install '.[top]' in a checkout, or use --json") from None
    if not once and not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise ConfigError("the live view needs a terminal: use --once, or --json, which writes a line per look")


async def _look(session: aiohttp.ClientSession, replicas: Sequence[str]) -> list[Sample]:
    return list(await asyncio.gather(*(_ask(session, replica) for replica in replicas)))


async def _ask(session: aiohttp.ClientSession, replica: str) -> Sample:
    """Ask one replica; what goes wrong is in the sample."""
    try:
        async with session.get(f"http://{replica}/debug/state?limit={_MOST_ROWS}") as response:
            if response.status != 200:  # noqa: PLR2004 - HTTP OK
                return Sample(replica, time.monotonic(), {}, {}, _refused(response.status))
            state = orjson.loads(await response.read())
        async with session.get(f"http://{replica}/metrics") as response:
            series = _read_metrics(await response.text())
    except TimeoutError:
        return Sample(replica, time.monotonic(), {}, {}, "no answer in time")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Sample(replica, time.monotonic(), {}, {}, _plainly(error))
    return Sample(replica, time.monotonic(), series, state)


def _read_metrics(text: str) -> Series:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def _refused(status: int) -> str:
    if status == 403:  # noqa: PLR2004 - HTTP Forbidden
        return "answers on its own machine only (KVLOOP_DEBUG_STATE=anyone changes that)"
    if status == 404:  # noqa: PLR2004 - HTTP Not Found
        return "no kvloop admin port, or KVLOOP_DEBUG_STATE=off"
    return f"HTTP status {status}"


def _plainly(error: Exception) -> str:
    """Say what went wrong in a few words; aiohttp's own texts are made for programmers."""
    number = getattr(error, "errno", None) or getattr(getattr(error, "os_error", None), "errno", None)
    if isinstance(error, ValueError):
        return "not kvloop's admin port"
    return os.strerror(number).lower() if number and number > 0 else type(error).__name__


def _nobody(samples: list[Sample]) -> str:
    reasons = "; ".join(f"{sample.replica}: {sample.error}" for sample in samples)
    return f"nothing to see ({reasons}). Is `kvloop serve` running, and is this its KVLOOP_ADMIN_LISTEN?"


def _remember(history: deque[list[Sample]], samples: list[Sample]) -> None:
    """Add a look, and forget those older than the window but for one."""
    history.append(samples)
    while len(history) > 2 and samples[0].at - history[1][0].at >= _WINDOW_SECONDS:  # noqa: PLR2004 - two make a rate
        history.popleft()


def _seen(history: Sequence[list[Sample]]) -> dict[str, Any]:
    """Compare the last look with the oldest in which each replica was there."""
    last = history[-1]
    pairs = [
        (next(look[index] for look in history if not look[index].error or look is last), now)
        for index, now in enumerate(last)
    ]
    return picture(pairs, _MOST_ROWS)


def _print_json(seen: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(seen).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Take keys one by one and unseen; the event is set by q."""
    quits = asyncio.Event()
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed() -> None:
        if set(os.read(keyboard, 64)) & set(b"qQ\x1b\x04"):
            quits.set()

    tty.setcbreak(keyboard)
    asyncio.get_running_loop().add_reader(keyboard, pressed)
    try:
        yield quits
    finally:
        asyncio.get_running_loop().remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
