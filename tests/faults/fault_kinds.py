"""Every kind of fault: whom it strikes, how, and which requests may fail by its nature.

A kind is a function that does it all, from the blow until the site serves again. It runs while the load goes on.
"""

from __future__ import annotations

import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from extproc_caller import KINDS, Caller
from fault_load import Load
from fault_site import STREAM_IDLE_SECONDS, FaultSite, Part

from bench.site import HOST
from extproc.http2 import PREFACE
from workers.sim.text import WORDS

MESSAGE_TIMEOUT_SECONDS = 5.0
"""Envoy's patience with one ext_proc answer, as ``envoy_config`` sets it."""


class MayFail(StrEnum):
    """Which requests a fault may cost."""

    NONE = "none"
    THROUGH_IT = "those on it"
    """Requests under way on the part that is struck, and those sent to it before Envoy has noticed."""


@dataclass
class Drill:
    """What a fault is done with. ``struck`` is the part it chose."""

    site: FaultSite
    load: Load
    dice: random.Random
    pace: float = 1.0
    """How long waits are, compared with a long run's."""
    struck: Part | None = None

    def choose(self, parts: list[Part]) -> Part:
        """Choose whom to strike."""
        self.struck = self.dice.choice(parts)
        return self.struck

    def wait(self, least: float, most: float) -> None:
        """Let some time pass, drawn anew each time."""
        time.sleep(self.pace * self.dice.uniform(least, most))


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    may_fail: MayFail
    strike: Callable[[Drill], None]
    restarts: bool = False
    """Whether a part's memory, counters included, is lost with it."""
    strikes_workers: bool = False
    is_envoys: bool = True
    """Whether all of ext_proc's streams come from Envoy."""


def _victims(which: str) -> Callable[[Drill], list[Part]]:
    return lambda drill: {
        "ext_proc": drill.site.extproc,
        "Envoy": [drill.site.envoy],
        "P": drill.site.prefill,
        "D": drill.site.decode,
    }[which]


def killed(which: str) -> Callable[[Drill], None]:
    """Kill it outright (SIGKILL), leave it dead for a moment, start it again."""

    def strike(drill: Drill) -> None:
        part = drill.choose(_victims(which)(drill))
        part.component.kill()
        drill.wait(0.0, 1.0)
        drill.site.bring_back(part)

    return strike


def terminated(which: str) -> Callable[[Drill], None]:
    """Ask it to end (SIGTERM), wait for its end, start it again."""

    def strike(drill: Drill) -> None:
        part = drill.choose(_victims(which)(drill))
        part.component.stop()
        drill.site.bring_back(part)

    return strike


def paused(which: str, least: float, most: float) -> Callable[[Drill], None]:
    """Stop it where it is (SIGSTOP), let it go on later (SIGCONT)."""

    def strike(drill: Drill) -> None:
        part = drill.choose(_victims(which)(drill))
        part.pause()
        try:
            drill.wait(least, most)
        finally:
            part.go_on()
        drill.site.wait_until_serving()

    return strike


def both_prefill_workers_killed(drill: Drill) -> None:
    """Leave nobody to prefill: D serves alone."""
    for part in drill.site.prefill:
        part.component.kill()
    drill.wait(1.0, 2.0)
    for part in drill.site.prefill:
        part.component.start()
    drill.site.wait_until_serving()


def both_extprocs_killed(drill: Drill) -> None:
    """Leave nobody to process: Envoy lets no request through unseen."""
    for part in drill.site.extproc:
        part.component.kill()
    drill.wait(0.5, 1.5)
    for part in drill.site.extproc:
        part.component.start()
    drill.site.wait_until_serving()


def clients_leave(drill: Drill) -> None:
    """Let clients go away at any moment of a turn: half of them close, half of them reset."""
    for number in range(round(20 * drill.pace)):
        with socket.create_connection((HOST, drill.site.port)) as client:
            client.sendall(_chat(f"leaver-{drill.dice.getrandbits(32)}", _words(drill.dice, 200)))
            drill.wait(0.0, 0.4)
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def streams_cancelled(drill: Drill) -> None:
    """Cancel ext_proc streams after each kind of message, on both replicas."""
    for replica in drill.site.extproc:
        caller = Caller(replica.port)
        try:
            for kind in KINDS:
                caller.cancelled_after(kind, f"cancelled-{drill.dice.getrandbits(32)}", _words(drill.dice, 100))
        finally:
            caller.close()


def slow_clients(drill: Drill) -> None:
    """Have clients that read nothing for a while, of long answers, and then all of it; and some that never do."""
    with ExitStack() as open_clients:
        clients = []
        for _ in range(6):
            client = open_clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(60)
            client.connect((HOST, drill.site.port))
            name = f"slow-{drill.dice.getrandbits(32)}"
            client.sendall(_chat(name, _words(drill.dice, 100), b',"ignore_eos":true,"max_tokens":150'))
            clients.append(client)
        drill.wait(2.0, 3.0)
        for client in clients[:4]:
            answer = b""
            while piece := client.recv(1024):
                answer += piece
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-300:]


def half_open_clients(drill: Drill) -> None:
    """Have clients that stop in the middle of their request and never say so; Envoy must end them at its idle timeout."""
    whole = _chat("half", _words(drill.dice, 200))
    with ExitStack() as open_clients:
        clients = []
        for cut in (40, len(whole) // 2, len(whole) - 1):
            client = open_clients.enter_context(socket.create_connection((HOST, drill.site.port), timeout=60))
            client.sendall(whole[:cut])
            clients.append(client)
        deadline = time.monotonic() + STREAM_IDLE_SECONDS + 30
        for client in clients:
            while client.recv(1024):
                assert time.monotonic() < deadline, "a half-open client outlives every timeout"


def half_open_peers(drill: Drill) -> None:
    """Have peers of ext_proc that connect, say half of something, and fall silent; then they vanish."""
    for replica in drill.site.extproc:
        with ExitStack() as open_peers:
            for said in (b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0\x20\1\4\0\0\0\1half", b"GET / HTTP/1.1\r\n"):
                for port in (replica.port, replica.admin_port):
                    peer = open_peers.enter_context(socket.create_connection((HOST, port), timeout=10))
                    peer.sendall(said)
            drill.wait(0.5, 1.5)


def no_space_for_ext_proc_logs(drill: Drill) -> None:
    """Let every byte ext_proc logs fail, as on a full disk."""
    part = drill.choose(drill.site.extproc)
    with part.limited(resource.RLIMIT_FSIZE, part.component.log.stat().st_size):
        drill.wait(1.5, 3.0)
    written = part.component.log.stat().st_size
    drill.site.until(lambda: part.component.log.stat().st_size > written, "ext_proc logs again once there is space")


def no_space_for_envoy_logs(drill: Drill) -> None:
    """Let Envoy's access log fail."""
    drill.struck = drill.site.envoy
    drill.site.reopen_access_log(Path("/dev/full"))
    try:
        drill.wait(1.5, 3.0)
    finally:
        drill.site.reopen_access_log(drill.site.access_log_written)


def no_descriptors_for_ext_proc(drill: Drill) -> None:
    """Leave ext_proc without a free file descriptor: nothing new can be opened or accepted."""
    part = drill.choose(drill.site.extproc)
    with part.limited(resource.RLIMIT_NOFILE, 5):
        drill.wait(1.5, 3.0)
    drill.site.wait_until_serving()


def no_descriptors_for_envoy(drill: Drill) -> None:
    """Leave Envoy without a free file descriptor: it crashes at the next connection it wants to open, and is started again."""
    part = drill.choose([drill.site.envoy])
    with part.limited(resource.RLIMIT_NOFILE, 5):
        drill.wait(1.5, 3.0)
    drill.site.bring_back(part)


EVERY_KIND = (
    *(
        Kind(
            f"{which} killed",
            MayFail.NONE if which == "P" else MayFail.THROUGH_IT,
            killed(which),
            restarts=True,
            strikes_workers=which in ("P", "D"),
        )
        for which in ("ext_proc", "Envoy", "P", "D")
    ),
    *(
        Kind(
            f"{which} terminated",
            MayFail.NONE if which in ("P", "ext_proc") else MayFail.THROUGH_IT,
            terminated(which),
            restarts=True,
            strikes_workers=which in ("P", "D"),
        )
        for which in ("ext_proc", "Envoy", "P", "D")
    ),
    *(
        Kind(f"{which} paused", MayFail.NONE, paused(which, 0.5, 2.5), strikes_workers=which in ("P", "D"))
        for which in ("ext_proc", "Envoy", "P", "D")
    ),
    Kind("ext_proc paused for long", MayFail.THROUGH_IT, paused("ext_proc", 6.0, 8.0)),
    Kind("P paused for long", MayFail.NONE, paused("P", 4.5, 8.0), strikes_workers=True),
    Kind("both P killed", MayFail.NONE, both_prefill_workers_killed, restarts=True, strikes_workers=True),
    Kind("both ext_proc killed", MayFail.THROUGH_IT, both_extprocs_killed, restarts=True),
    Kind("clients leave", MayFail.NONE, clients_leave),
    Kind("streams cancelled", MayFail.NONE, streams_cancelled, is_envoys=False),
    Kind("slow clients", MayFail.NONE, slow_clients),
    Kind("half-open clients", MayFail.NONE, half_open_clients),
    Kind("half-open peers of ext_proc", MayFail.NONE, half_open_peers),
    Kind("no space for ext_proc's logs", MayFail.NONE, no_space_for_ext_proc_logs),
    Kind("no space for Envoy's logs", MayFail.NONE, no_space_for_envoy_logs),
    Kind("no descriptors for Envoy", MayFail.THROUGH_IT, no_descriptors_for_envoy, restarts=True),
    Kind("no descriptors for ext_proc", MayFail.NONE, no_descriptors_for_ext_proc),
)


def _words(dice: random.Random, count: int) -> str:
    return "".join(dice.choices(WORDS, k=count))


def _chat(conversation: str, text: str, more: bytes = b"") -> bytes:
    body = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"' + text.encode() + b'"}]' + more + b"}"
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"x-conversation-id: {conversation}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
