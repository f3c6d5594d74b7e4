"""The stack's own life, with stand-ins for vLLM, ext_proc and Envoy (the real ones: tests/e2e)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stack_fakes
import yaml
from stack_fakes import recorded, running, wait_for

from workers import stack as stacks
from workers.launch import WorkerCommand
from workers.stack import Ports, Stack, StackOptions
from workers.supervision import Progress, StackError

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE = stack_fakes.__file__


def fake(directory: Path, *ports: str) -> tuple[str, ...]:
    return (sys.executable, FAKE, str(directory), *ports)


class FakeStack(Stack):
    """A stack whose parts are stand-ins, with the ports and the environment of the real ones."""

    def _component(self, role: stacks.Role) -> stacks.Component:
        component = super()._component(role)
        component.grace_seconds = 0.3
        if role == "extproc":
            component.argv = fake(self.options.run_directory, str(self.ports.extproc_admin), str(self.ports.extproc))
        if role == "envoy":
            upstreams = [self.ports.prefill, self.ports.decode, self.ports.extproc]
            (self.options.run_directory / "upstreams.json").write_text(json.dumps(upstreams))
            component.argv = fake(self.options.run_directory, f"{self.ports.envoy_admin},{self.ports.envoy}")
        return component

    def _worker(self, role: stacks.WorkerRole, changes: Any) -> tuple[tuple[str, ...], dict[str, str]]:
        _, env = super()._worker(role, changes)
        port = self.ports.prefill if role == "prefill" else self.ports.decode
        return fake(self.options.run_directory, str(port)), env


def options(directory: Path, **changes: Any) -> StackOptions:
    return StackOptions(model=Path("/models/fake"), run_directory=directory, **changes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def seen() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def stack(directory: Path, seen: list[Progress]) -> Iterator[Stack]:
    with FakeStack(options(directory, extproc_env={"KVLOOP_LOG_LEVEL": "debug"}), seen.append) as started:
        yield started


def environment(stack: Stack, role: stacks.Role) -> dict[str, str]:
    """Return what the part's own process was really given."""
    pid = next(
        pid
        for pid in stack.pids()
        if pid in recorded(stack.options.run_directory) and _port_of(stack, role) in _argv(pid)
    )
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if entry)


def _argv(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


def _port_of(stack: Stack, role: stacks.Role) -> str:
    return stack.url(role).rpartition(":")[2]


def test_every_part_is_reported_ready(stack: Stack, seen: list[Progress]) -> None:
    assert stack.pids()
    assert {step.component for step in seen if step.state == "ready"} == {
        "prefill worker",
        "decode worker",
        "ext_proc",
        "Envoy",
    }


def test_ports_differ() -> None:
    ports = Ports.free()
    numbers = [getattr(ports, name) for name in Ports.__dataclass_fields__]
    assert len(set(numbers)) == len(numbers) == 9


def test_prefill_and_decode_run_on_different_cores(stack: Stack) -> None:
    usable = os.sched_getaffinity(0)
    assert stack.cores("prefill") <= usable
    assert stack.cores("decode") <= usable
    assert stack.cores("prefill") != stack.cores("decode") or len(usable) == 1


def test_the_warm_up_is_one_conversation_of_two_turns_with_its_own_cache_salt(stack: Stack, directory: Path) -> None:
    first, second = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    assert [message["role"] for message in second["body"]["messages"]] == ["user", "assistant", "user"]
    assert second["body"]["messages"][1]["content"] == "an answer"
    conversation = first["headers"]["x-conversation-id"]
    assert second["headers"]["x-conversation-id"] == conversation
    assert first["body"]["cache_salt"] == second["body"]["cache_salt"] == conversation
    assert first["body"]["model"] == stack.options.served_model_name


def test_the_parts_are_configured_for_each_other(stack: Stack, directory: Path) -> None:
    extproc = environment(stack, "extproc")
    assert extproc["KVLOOP_PREFILL_URL"] == f"http://127.0.0.1:{stack.ports.envoy_prefill}"
    assert extproc["KVLOOP_LISTEN"] == f"127.0.0.1:{stack.ports.extproc}"
    assert extproc["KVLOOP_LOG_LEVEL"] == "debug"
    for role in stacks.WORKERS:
        assert environment(stack, role)["KVLOOP_WORKER_SECRET"] == extproc["KVLOOP_WORKER_SECRET"] == stack.secret
    listeners = yaml.safe_load((directory / "envoy.yaml").read_text())["static_resources"]["listeners"]
    ports = [listener["address"]["socket_address"]["port_value"] for listener in listeners]
    assert ports == [stack.ports.envoy, stack.ports.envoy_prefill]


def test_metrics_are_summed_over_their_labels(stack: Stack) -> None:
    assert stack.metrics("decode")["vllm:prompt_tokens_total"] == 7.0
    assert stack.kv_cache_usage("decode") == 0.25


def test_ext_proc_restarts_with_settings_for_one_life(stack: Stack) -> None:
    stack.restart_extproc({"KVLOOP_REUSE": "false"})
    assert environment(stack, "extproc")["KVLOOP_REUSE"] == "false"
    stack.restart_extproc()
    assert "KVLOOP_REUSE" not in environment(stack, "extproc")


def test_a_killed_worker_is_noticed_and_comes_back_on_its_port(stack: Stack) -> None:
    stack.check()
    stack.kill("decode")
    with pytest.raises(StackError, match="decode worker ended"):
        stack.check()
    stack.restart_worker("decode")
    stack.check()
    assert stack.metrics("decode")["vllm:prompt_tokens_total"] == 7.0


def test_worker_arguments_reach_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, dict[str, Any]]] = []

    def worker_command(role: str, model: str, **arguments: Any) -> WorkerCommand:
        calls.append((role, model, arguments))
        return WorkerCommand(("true",), {"FROM_LAUNCHER": role})

    monkeypatch.setattr(stacks, "worker_command", worker_command)
    built = Stack(options(tmp_path, prefill={"prefix_caching": False}, decode={"ttl_seconds": 20, "secret": None}))
    (_, model, prefill), (_, _, decode) = calls
    assert model == "/models/fake"
    assert prefill["prefix_caching"] is False
    assert (decode["ttl_seconds"], decode["secret"]) == (20, None)
    assert (prefill["port"], prefill["side_channel_port"]) == (built.ports.prefill, built.ports.prefill_side_channel)
    assert (decode["port"], decode["side_channel_port"]) == (built.ports.decode, built.ports.decode_side_channel)


def test_the_workers_sockets_go_where_their_paths_are_short() -> None:
    assert stacks.socket_directory("/short") == "/short"
    assert stacks.socket_directory("/home/somebody" * 4) == "/tmp"


def test_the_workers_temporary_files_go_away_with_the_stack(tmp_path: Path) -> None:
    with FakeStack(options(tmp_path)) as started:
        temporary = Path(environment(started, "decode")["TMPDIR"])
        assert temporary.is_dir()
    assert not temporary.exists()


def test_nothing_is_left_after_a_stack(tmp_path: Path) -> None:
    with FakeStack(options(tmp_path)) as started:
        assert len(running(recorded(tmp_path))) == 4 * 3
        assert started.pids()
    assert running(recorded(tmp_path)) == []


def test_a_part_that_dies_at_start_takes_the_others_down_and_is_named(tmp_path: Path) -> None:
    class Broken(FakeStack):
        def _worker(self, role: stacks.WorkerRole, changes: Any) -> tuple[tuple[str, ...], dict[str, str]]:
            argv, env = super()._worker(role, changes)
            dying = (sys.executable, "-c", "import time; time.sleep(1); raise SystemExit('no such thing')")
            return (dying if role == "prefill" else argv), env

    with pytest.raises(StackError, match=r"prefill worker ended with exit status 1(.|\n)*no such thing"):
        Broken(options(tmp_path)).__enter__()
    assert running(recorded(tmp_path)) == []


def test_ctrl_c_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    owner_script = textwrap.dedent(
        f"""
        import signal
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(FAKE).parent)!r})
        from test_stack import FakeStack, options
        # A shell that runs the tests in the background would have us ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def never_ready(self):
            print("waiting", flush=True)
            return False
        FakeStack._extproc_serves = never_ready
        FakeStack(options(Path(sys.argv[1]))).__enter__()
        """
    )
    with subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-c", owner_script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(FAKE).parents[2],
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"waiting\n"
        assert wait_for(lambda: len(running(recorded(tmp_path))) == 4 * 3)
        owner.send_signal(2)
        _, complaint = owner.communicate(timeout=60)
    assert b"KeyboardInterrupt" in complaint
    assert running(recorded(tmp_path)) == []


def test_an_error_from_the_first_request_is_told(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "request", lambda *_, **__: stacks.Answer(503, "no healthy upstream"))
    with pytest.raises(StackError, match="answered with 503: no healthy upstream"):
        stack.warm_up()
