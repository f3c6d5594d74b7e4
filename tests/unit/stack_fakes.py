"""Stand-ins for the processes of a stack: they answer health checks and leave stubborn grandchildren behind."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

LEAVE_ORPHAN = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
    " start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
)

METRICS = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 3.0
vllm:prompt_tokens_total{engine="1"} 4.0
"""


def record(directory: Path, pid: int) -> None:
    (directory / f"{pid}.pid").touch()


def recorded(directory: Path) -> list[int]:
    return [int(path.stem) for path in directory.glob("*.pid")]


def running(pids: list[int]) -> list[int]:
    """Return those of ``pids`` that exist and are no zombies."""
    return [pid for pid in pids if _state(pid) not in {"", "Z", "X"}]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Poll until ``condition`` holds; return whether it ever did."""
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


def leave_grandchildren(directory: Path) -> None:
    """Start two processes that ignore SIGTERM: one below this process, one orphaned in a session of its own."""
    record(directory, subprocess.Popen([sys.executable, "-c", STUBBORN]).pid)  # noqa: S603 - our own script
    orphan = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", LEAVE_ORPHAN, STUBBORN], check=True, capture_output=True
    )
    record(directory, int(orphan.stdout))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Answers(http.server.BaseHTTPRequestHandler):
    """Whatever any part of a stack is asked while it starts and warms up."""

    def do_GET(self) -> None:
        if self.path.startswith("/clusters"):
            hosts = [
                {
                    "address": {"socket_address": {"port_value": port}},
                    "health_status": {"eds_health_status": "HEALTHY"}
                    | ({} if listens(port) else {"failed_active_health_check": True}),
                }
                for port in json.loads(Path("upstreams.json").read_text())
            ]
            self.answer(json.dumps({"cluster_statuses": [{"host_statuses": hosts}, {"name": "empty"}]}))
        else:
            self.answer(METRICS if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with Path("requests.jsonl").open("a") as requests:
            requests.write(json.dumps({"headers": dict(self.headers), "body": request}) + "\n")
        self.answer(json.dumps({"choices": [{"message": {"content": "an answer"}}]}))

    def answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """``stack_fakes.py DIRECTORY HTTP_PORT[,…] [GRPC_PORT]``: record the process ids, then serve until killed."""
    directory = Path(sys.argv[1])
    os.chdir(directory)
    record(directory, os.getpid())
    leave_grandchildren(directory)
    kept_alive = serve_grpc_health(int(sys.argv[3])) if len(sys.argv) > 3 else None
    print("Starting to load model", kept_alive, flush=True)
    first, *more = [
        http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Answers) for port in sys.argv[2].split(",")
    ]
    for server in more:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    first.serve_forever()


def serve_grpc_health(port: int) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server


if __name__ == "__main__":
    main()
