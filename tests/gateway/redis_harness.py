"""A real Redis server for tests: started in a tenth of a second, stopped, killed, frozen and looked into."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import redis
from gateway_harness import free_ports

HOST = "127.0.0.1"
PATIENCE_SECONDS = 30.0


class RedisServer:
    """One server on a port of its own, without snapshots unless ``saves``. Use as a context manager."""

    def __init__(self, directory: Path, *options: str, saves: bool = False, tls: bool = False) -> None:
        program = shutil.which("redis-server")
        assert program, "these tests need redis-server: apt-get install redis-server"
        (self.port,) = free_ports(1)
        self.url = f"redis{'s' * tls}://{HOST}:{self.port}/0"
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        files = ["--dir", str(directory), "--save", "3600 1" if saves else "", "--appendonly", "no"]
        self._command = [program, *ports, "--bind", HOST, *files, *options]
        self._answers_plainly = not tls
        self._log = directory / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server and wait until it listens and, without TLS, answers: whatever it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)  # noqa: S603 - our own
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port)) as connection:
                connection.sendall(b"PING\r\n" * self._answers_plainly)
                if not self._answers_plainly or connection.recv(1):
                    return
            time.sleep(0.02)
        raise AssertionError(self._log.read_text())

    def client(self, **options: Any) -> redis.Redis:
        """Return a client of the server."""
        return redis.Redis(host=HOST, port=self.port, **options)

    def kill(self) -> None:
        """Kill the server outright: whatever was not saved is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the process where it stands: connections stay open, nothing is answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def everything(self) -> bytes:
        """Return all keys and values, one after the other."""
        client = self.client()
        return b"\n".join(part for name in client.scan_iter() for part in (name, client.get(name) or b""))
