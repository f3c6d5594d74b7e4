"""The real Envoy and the real ext_proc service in front of simulated workers, for tests; started in a second or two.

``Gateway`` starts and stops the parts, ``Chat`` plays the client of one conversation, ``Answer`` is what it got. What a
right answer is needs no second run: the simulated model's text is a function of the KV it holds, so ``right_text`` says
what a worker with right KV answers.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from extproc import envoy_binary, envoy_config
from extproc.settings import EnvoySettings
from workers.sim.answer import right_answer
from workers.sim.engine import EngineSettings
from workers.sim.fleet import Fleet
from workers.sim.settings import WorkerSettings
from workers.sim.worker import Received
from workers.supervision import Component, inherited_environment, stop_all, wait_until_ready

HOST = "127.0.0.1"
SECRET = "the-gateway's"
START_TIMEOUT_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
_names = itertools.count(1)


@dataclass
class Answer:
    """One HTTP answer, read to its end (or to where the connection broke: then ``broken`` says how)."""

    status: int
    headers: dict[str, str]
    pieces: list[tuple[float, bytes]]
    """Body bytes as they arrived, each with the seconds since the request was sent."""
    broken: str = ""

    @cached_property
    def raw(self) -> bytes:
        """The body, byte for byte."""
        return b"".join(piece for _, piece in self.pieces)

    @cached_property
    def receipt(self) -> dict[str, Any]:
        """``x-kvloop-receipt``, parsed: ``{"outcome": "reused", "reused": 3853, "prefill_ms": 230.5, …}``."""
        value = self.headers.get("x-kvloop-receipt", "")
        return {key: _number(text) for key, _, text in (item.partition("=") for item in value.split(", ") if item)}

    @property
    def outcome(self) -> str | None:
        return self.receipt.get("outcome")

    @property
    def reason(self) -> str | None:
        return self.receipt.get("reason")

    @cached_property
    def events(self) -> list[Any]:
        """The JSON of each whole event of a stream, ``[DONE]`` left out."""
        data = [event[6:] for event in self.raw.split(b"\n\n")[:-1] if event.startswith(b"data: ")]
        return [json.loads(event) for event in data if event != b"[DONE]"]

    @property
    def is_done(self) -> bool:
        """Whether a stream came to its proper end."""
        return self.raw.endswith(b"data: [DONE]\n\n") and not self.broken

    @cached_property
    def json(self) -> Any:
        """The body of a non-streamed answer."""
        return json.loads(self.raw)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def text_of(self, index: int = 0) -> str:
        """Return what choice ``index`` says, streamed or not, chat or completion."""
        bodies = self.events if self.is_stream else [self.json]
        choices = [choice for body in bodies for choice in body.get("choices", ()) if choice["index"] == index]
        return "".join(_said(choice) for choice in choices)

    @cached_property
    def text(self) -> str:
        return self.text_of(0)

    @property
    def finish_reason(self) -> str | None:
        bodies = self.events if self.is_stream else [self.json]
        reasons = [choice["finish_reason"] for body in bodies for choice in body.get("choices", ())]
        return next((reason for reason in reversed(reasons) if reason), None)

    def told(self, *, nulls: bool = False) -> set[str]:
        """Return every JSON key anywhere in the answer that has a value; with ``nulls`` those without one, too."""
        return set().union(*(_told(body, nulls=nulls) for body in (self.events if self.is_stream else [self.json])))


@dataclass
class Chat:
    """One conversation's client: keeps the messages and sends them all again with each turn."""

    gateway: Gateway
    conversation: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    """Sent with every turn."""

    def say(self, text: str, **options: Any) -> Answer:
        """Send one user message and take the answer into the history. ``options`` as for ``Gateway.chat``."""
        self.messages.append({"role": "user", "content": text})
        answer = self.again(**options)
        if answer.status == http.client.OK and not answer.broken:
            self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def again(self, **options: Any) -> Answer:
        """Send the history as it stands, and leave it so."""
        return self.gateway.chat(self.conversation, self.messages, **{**self.fields, **options})


class Gateway:
    """Workers, ext_proc and Envoy. Use as a context manager; requests may be sent from any thread."""

    def __init__(
        self,
        directory: Path,
        *,
        prefill: list[WorkerSettings],
        decode: list[WorkerSettings],
        replicas: int = 1,
        extproc_env: dict[str, str] | None = None,
        envoy: dict[str, Any] | None = None,
        edit_envoy: Callable[[str], str] = lambda text: text,
        worker_tls: ssl.SSLContext | None = None,
        prefill_scheme: str = "http",
        waits_for_extproc: bool = True,
    ) -> None:
        self.directory = directory
        self.secret = SECRET
        self.fleet = Fleet(
            [replace(settings, secret=SECRET) for settings in prefill],
            [replace(settings, secret=SECRET) for settings in decode],
        )
        self.extproc_env = extproc_env or {}
        self._envoy_options = envoy or {}
        self._edit_envoy = edit_envoy
        self._prefill_scheme = prefill_scheme
        self._waits_for_extproc = waits_for_extproc
        for sim in self.fleet.workers:
            sim.tls = worker_tls
        ports = free_ports(3 + 2 * replicas)
        self.port, self.prefill_port, self.admin_port = ports[:3]
        self._extproc_ports = _pairs(ports[3:])
        self.extproc = [self._extproc_component(index) for index in range(replicas)]
        self.envoy: Component | None = None

    @property
    def base_url(self) -> str:
        """Where clients connect."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        try:
            self._start()
        except BaseException:
            print(self.logs())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_all([part for part in (self.envoy, *self.extproc) if part is not None])
        self.fleet.__exit__()

    # --- requests -----------------------------------------------------------------------------------------------

    def new_chat(self, **fields: Any) -> Chat:
        """Return the client of a conversation nobody has had yet."""
        return Chat(self, f"conversation-{os.getpid()}-{next(_names)}", fields=fields)

    def chat(
        self,
        conversation: str | None,
        messages: list[dict[str, Any]],
        *,
        stream: bool = True,
        tenant: str | None = None,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Post a chat turn. ``tenant`` is sent as a bearer token, ``fields`` are top-level fields of the body."""
        body = {"model": "sim", "messages": messages, "stream": stream, **fields}
        return self.post("/v1/chat/completions", body, headers=_identity(conversation, tenant, headers))

    def completions(
        self,
        conversation: str | None,
        prompt: Any,
        *,
        stream: bool = True,
        tenant: str | None = None,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Post a completion; ``prompt`` is text, token ids or a list of either."""
        body = {"model": "sim", "prompt": prompt, "stream": stream, **fields}
        return self.post("/v1/completions", body, headers=_identity(conversation, tenant, headers))

    def post(self, path: str, body: Any, *, headers: dict[str, str] | None = None, port: int | None = None) -> Answer:
        """Post JSON (or ``bytes``, as they are)."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, payload, {"content-type": "application/json", **(headers or {})}, port=port)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        port: int | None = None,
    ) -> Answer:
        """Make one request on a connection of its own (to the main listener, if not to ``port``) and read the answer."""
        port = self.port if port is None else port
        with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS)) as connection:
            started = time.monotonic()
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, [])
            try:
                while piece := response.read1(1 << 20):
                    answer.pieces.append((time.monotonic() - started, piece))
            except (http.client.HTTPException, OSError) as error:
                answer.broken = repr(error)
            return answer

    def abandon(self, conversation: str | None, messages: list[dict[str, Any]], after: Any, **fields: Any) -> None:
        """Start a chat turn and reset the connection after that many seconds, or once ``after()`` is true."""
        body = json.dumps({"model": "sim", "messages": messages, "stream": True, **fields}).encode()
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE_SECONDS)) as connection:
            headers = {"content-type": "application/json", **_identity(conversation, None, None)}
            connection.request("POST", "/v1/chat/completions", body, headers)
            if callable(after):
                self.until(after)
            else:
                time.sleep(after)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def received(self, role: str, *, path: str | None = None, leg: str | None = None) -> list[Received]:
        """Return the requests the ``prefill`` or ``decode`` workers got, oldest first, health checks left out.

        ``leg`` is the gateway's own call: ``render``, ``prefill`` or ``release``.
        """
        got = self.fleet.received(self.fleet.prefill if role == "prefill" else self.fleet.decode)
        return [
            received
            for received in got
            if received.path != "/health"
            and (path is None or received.path == path)
            and (leg is None or received.leg == leg)
        ]

    def right_text(self, messages: list[dict[str, Any]], *, worker: int = 0, **fields: Any) -> str:
        """Return what decode worker ``worker`` answers to a chat when its KV is right."""
        return right_answer("chat", {"messages": messages, **fields}, self.fleet.decode[worker].settings)

    def right_completion(self, prompt: Any, *, worker: int = 0, **fields: Any) -> str:
        """Return the same for a completion."""
        return right_answer("completions", {"prompt": prompt, **fields}, self.fleet.decode[worker].settings)

    # --- looking in -----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the workers' counters summed, and each worker's own under ``workers`` (prefill first)."""
        reports = self.fleet.reports()
        numbers = [key for key, value in reports[0].items() if type(value) is int]
        return {**{key: sum(report[key] for report in reports) for key in numbers}, "workers": reports}

    def metrics(self, replica: int = 0) -> str:
        """Return ext_proc's ``/metrics``."""
        return self._get(self._extproc_ports[replica][1], "/metrics")[1]

    def extproc_admin_port(self, replica: int = 0) -> int:
        """Return the port of ext_proc's admin interface."""
        return self._extproc_ports[replica][1]

    def debug_state(self, replica: int = 0) -> dict[str, Any]:
        """Return ext_proc's ``/debug/state``."""
        return dict(json.loads(self._get(self._extproc_ports[replica][1], "/debug/state")[1]))

    def envoy_stats(self, prefix: str) -> dict[str, int]:
        """Return Envoy's counters and gauges whose names start with ``prefix``."""
        lines = self._get(self.admin_port, f"/stats?filter=^{prefix}")[1].splitlines()
        return {name: int(value) for name, _, value in (line.partition(": ") for line in lines) if value.isdigit()}

    def access_log(self) -> list[dict[str, Any]]:
        """Return Envoy's access log so far. Lines of requests just ended may take a moment to appear."""
        path = self.directory / "access.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def logs(self) -> str:
        """Return what ext_proc and Envoy wrote."""
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-20_000:]}" for path in files)

    def until(self, fact: Any, what: str = "") -> Any:
        """Wait for ``fact()`` to return something true, and return it; fail when it never does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if found := fact():
                return found
            time.sleep(0.01)
        raise AssertionError(f"still not so after {PATIENCE_SECONDS} s: {what or fact}")

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill_extproc(self, replica: int = 0) -> None:
        """Kill an ext_proc replica outright."""
        self.extproc[replica].kill()

    def stop_extproc(self, replica: int = 0) -> None:
        """Stop an ext_proc replica in order: it drains and releases what it kept."""
        self.extproc[replica].stop()

    def start_extproc(self, replica: int = 0, env: dict[str, str] | None = None) -> None:
        """Start a stopped replica, with ``env`` on top of its settings for this start, and wait until Envoy uses it."""
        component = self.extproc[replica]
        port = self._extproc_ports[replica][0]
        self.until(lambda: not self._upstream_health().get(port, True), "Envoy has missed the stopped ext_proc")
        component.env = {**self._extproc_environment(replica), **(env or {})}
        component.start()
        self.wait_until_routable()

    def restart_extproc(self, replica: int = 0, env: dict[str, str] | None = None) -> None:
        """Stop a replica in order and start it again: its memory store is empty."""
        self.stop_extproc(replica)
        self.start_extproc(replica, env)

    def crash_worker(self, worker: Any) -> None:
        """Take a worker down at once: connections reset, nobody listens, KV gone."""
        self.fleet.run(worker.stop())

    def start_worker(self, worker: Any) -> None:
        """Start a crashed worker on its old port, with a new engine id, and wait until Envoy uses it."""
        self.fleet.run(worker.start())
        self.wait_until_routable()

    def wait_until_routable(self) -> None:
        """Wait until Envoy holds every upstream for healthy."""
        assert self.envoy is not None
        wait_until_ready(
            {"envoy": (self.envoy, self._every_upstream_healthy)},
            timeout_seconds=START_TIMEOUT_SECONDS,
            progress=lambda _: None,
            poll_seconds=0.02,
        )

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for component in self.extproc:
            component.start()
        self._write_envoy_configuration()
        command = envoy_binary.envoy_command(self.directory / "envoy.yaml", concurrency=1)
        self.envoy = Component(
            name="Envoy",
            argv=tuple(command),
            env=inherited_environment(),
            log=self.directory / "envoy.log",
            grace_seconds=1.0,
        )
        self.envoy.start()
        probes = {
            f"extproc-{index}": (component, lambda port=admin: self._answers(port, "/healthz"))
            for index, (component, (_, admin)) in enumerate(zip(self.extproc, self._extproc_ports, strict=True))
        }
        wait_until_ready(probes, timeout_seconds=START_TIMEOUT_SECONDS, progress=lambda _: None, poll_seconds=0.02)
        self.wait_until_routable()

    def _write_envoy_configuration(self) -> None:
        usual = {
            "listen": f"{HOST}:{self.port}",
            "prefill_listen": f"{HOST}:{self.prefill_port}",
            "admin_listen": f"{HOST}:{self.admin_port}",
            "extproc": tuple(f"{HOST}:{grpc}" for grpc, _ in self._extproc_ports),
            "prefill": tuple(worker.address for worker in self.fleet.prefill),
            "decode": tuple(worker.address for worker in self.fleet.decode),
            "access_log": str(self.directory / "access.log"),
            "health_interval_seconds": 0.25,
        }
        rendered = envoy_config.render(EnvoySettings(**{**usual, **self._envoy_options}))
        (self.directory / "envoy.yaml").write_text(self._edit_envoy(rendered))

    def _extproc_component(self, replica: int) -> Component:
        return Component(
            name=f"ext_proc {replica}",
            argv=(sys.executable, "-m", "extproc.cli", "serve"),
            env=self._extproc_environment(replica),
            log=self.directory / f"extproc-{replica}.log",
            grace_seconds=5.0,
        )

    def _extproc_environment(self, replica: int) -> dict[str, str]:
        grpc_port, admin_port = self._extproc_ports[replica]
        return {
            **inherited_environment(),
            "KVLOOP_LISTEN": f"{HOST}:{grpc_port}",
            "KVLOOP_ADMIN_LISTEN": f"{HOST}:{admin_port}",
            "KVLOOP_PREFILL_URL": f"{self._prefill_scheme}://{HOST}:{self.prefill_port}",
            "KVLOOP_WORKER_SECRET": SECRET,
            "KVLOOP_SINGLE_HOST": "true",
            "KVLOOP_DRAIN_DELAY_SECONDS": "0",
            "KVLOOP_DRAIN_SECONDS": "2",
            "KVLOOP_LOG_LEVEL": "debug",
            **self.extproc_env,
        }

    def _every_upstream_healthy(self) -> bool:
        health = self._upstream_health()
        others = {} if self._waits_for_extproc else dict.fromkeys(grpc for grpc, _ in self._extproc_ports)
        return bool(health) and all(healthy for port, healthy in health.items() if port not in others)

    def _upstream_health(self) -> dict[int, bool]:
        """Return, by port, whether Envoy holds an upstream for healthy; empty while Envoy does not answer."""
        try:
            status, body = self._get(self.admin_port, "/clusters?format=json")
        except OSError:
            return {}
        return envoy_binary.read_upstream_health(body) if status == http.client.OK else {}

    def _answers(self, port: int, path: str) -> bool:
        try:
            return self._get(port, path)[0] == http.client.OK
        except OSError:
            return False

    def _get(self, port: int, path: str) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()


def worker(role: Any, *, engine: dict[str, Any] | None = None, **settings: Any) -> WorkerSettings:
    """Return settings of a worker as the tests use it: with the plugin, small blocks, no prefix cache on P.

    A prefill worker without prefix cache stands for another or an evicted one, so that every reuse is a read.
    """
    engine = {"prefix_caching": role == "decode", "repaired": role == "decode", **(engine or {})}
    plugin = {"streams_handles": True, "digests_handles": True} if role == "decode" else {}
    return WorkerSettings(role=role, engine=EngineSettings(**engine), **{**plugin, **settings})


def free_ports(count: int) -> list[int]:
    """Return loopback ports nobody uses, all held at once so that no two are the same.

    They lie below those the system gives to outgoing connections: one of these could take a port before its server does.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        while len(held) < count:
            with contextlib.suppress(OSError):
                server = socket.create_server((HOST, random.randrange(10_000, ephemeral)))
                held.append(stack.enter_context(server))
        return [server.getsockname()[1] for server in held]


def _pairs(ports: list[int]) -> list[tuple[int, int]]:
    return list(zip(ports[::2], ports[1::2], strict=True))


def _identity(conversation: str | None, tenant: str | None, headers: dict[str, str] | None) -> dict[str, str]:
    named = {} if conversation is None else {"x-conversation-id": conversation}
    known = {} if tenant is None else {"authorization": f"Bearer {tenant}"}
    return {**named, **known, **(headers or {})}


def _said(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return message.get("content") or choice.get("text") or ""


def _told(value: Any, *, nulls: bool) -> set[str]:
    if isinstance(value, dict):
        own = {key for key, inner in value.items() if nulls or inner is not None}
        return own.union(*(_told(inner, nulls=nulls) for inner in value.values()))
    return set().union(*(_told(inner, nulls=nulls) for inner in value)) if isinstance(value, list) else set()


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
