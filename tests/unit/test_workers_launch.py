from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from workers import launch
from workers.launch import LaunchError, WorkerCommand, add_arguments, check, kv_transfer_config, main, worker_command


def command(role: Any = "prefill", model: str = "/models/tiny", **options: Any) -> WorkerCommand:
    return worker_command(
        role, model, **{"device": "cpu", "port": 8100, "side_channel_port": 5600, "python": "python", **options}
    )


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def values(argv: tuple[str, ...], flag: str) -> list[str]:
    return [argv[index + 1] for index, word in enumerate(argv) if word == flag]


# --- the command ------------------------------------------------------------------------------------------------


def test_the_cpu_command_is_this() -> None:
    assert command(served_model_name="tiny", prefix_caching=False, cpu_core=1) == WorkerCommand(
        argv=(
            *("taskset", "-c", "1"),
            *("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny"),
            *("--host", "127.0.0.1", "--port", "8100"),
            "--kv-transfer-config",
            (
                '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_buffer_device":"cpu",'
                '"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"bidirectional_kv_xfer":true,'
                '"decoder_kv_blocks_ttl":480,"kv_recompute_threshold":64}}'
            ),
            "--enable-scale-out",
            *("--served-model-name", "tiny", "--no-enable-prefix-caching", "--block-size", "32", "--enforce-eager"),
        ),
        env={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
            "KVLOOP_PLUGIN_STREAM_HANDLE": "1",
            "KVLOOP_PLUGIN_DIGEST": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,sm,self",
            "KVLOOP_PLUGIN_CALM_NIXL": "1000",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def test_the_cuda_command_is_this() -> None:
    config = json.dumps(kv_transfer_config("decode", device="cuda", ttl_seconds=60), separators=(",", ":"))
    assert command("decode", "org/name", device="cuda", ttl_seconds=60) == WorkerCommand(
        argv=(
            *("vllm", "serve", "org/name", "--host", "127.0.0.1", "--port", "8100"),
            *("--kv-transfer-config", config, "--enable-scale-out"),
        ),
        env={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
            "KVLOOP_PLUGIN_STREAM_HANDLE": "1",
            "KVLOOP_PLUGIN_DIGEST": "1",
        },
    )


def test_every_start_draws_a_new_engine_id() -> None:
    assert "engine_id" not in kv_transfer_config("prefill")


def test_the_roles_differ_in_the_kv_role_only() -> None:
    prefill, decode = kv_transfer_config("prefill"), kv_transfer_config("decode")
    assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
    assert prefill == decode


def test_options_reach_the_transfer_config() -> None:
    argv = command(ttl_seconds=20, recompute_threshold_tokens=0, bidirectional=False).argv
    assert json.loads(values(argv, "--kv-transfer-config")[0])["kv_connector_extra_config"] == {
        "bidirectional_kv_xfer": False,
        "decoder_kv_blocks_ttl": 20,
        "kv_recompute_threshold": 0,
    }


@pytest.mark.parametrize(
    ("prefix_caching", "flags"),
    [(None, []), (True, ["--enable-prefix-caching"]), (False, ["--no-enable-prefix-caching"])],
)
def test_prefix_caching_is_vllms_default_unless_said(prefix_caching: bool | None, flags: list[str]) -> None:
    argv = command(prefix_caching=prefix_caching).argv
    assert [word for word in argv if word.endswith("prefix-caching")] == flags


def test_parts_of_the_plugin_can_be_switched_off() -> None:
    env = command(stream_handle=False, digest=False).env
    assert (env["KVLOOP_PLUGIN_STREAM_HANDLE"], env["KVLOOP_PLUGIN_DIGEST"]) == ("0", "0")


@pytest.mark.parametrize("extra", [("--block-size", "64"), ("--block-size=64",), ("--block_size", "64")])
def test_a_users_flag_replaces_ours_however_it_is_spelt(extra: tuple[str, ...]) -> None:
    argv = command(extra=extra).argv
    assert argv[-len(extra) :] == extra
    assert "32" not in argv


def test_a_users_negation_replaces_our_flag() -> None:
    argv = command(extra=("--no-enforce-eager", "--no-enable-prefix-caching"), prefix_caching=True).argv
    assert argv[-2:] == ("--no-enforce-eager", "--no-enable-prefix-caching")
    assert "--enforce-eager" not in argv
    assert "--enable-prefix-caching" not in argv


def test_a_users_middleware_stands_beside_the_guard() -> None:
    argv = command(secret="s", extra=("--middleware", "my.Thing")).argv
    assert values(argv, "--middleware") == ["workers.guard.SecretGuard", "my.Thing"]


def test_tuning_variables_that_are_set_are_left_alone_and_options_are_not() -> None:
    env = command(inherited={"OMP_NUM_THREADS": "4", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}).env
    assert "OMP_NUM_THREADS" not in env
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_a_hub_name_may_be_downloaded() -> None:
    assert "HF_HUB_OFFLINE" not in command(model="org/name").env


def test_the_shell_line_runs_the_same_command() -> None:
    built = command(extra=("--chat-template", "it's {{ here }}"))
    words = shlex.split(built.shell())
    assert tuple(words[len(built.env) :]) == built.argv
    assert dict(word.split("=", 1) for word in words[: len(built.env)]) == built.env


def test_the_shell_line_never_shows_the_secret() -> None:
    built = command(secret="hunter2")
    assert built.env["KVLOOP_WORKER_SECRET"] == "hunter2"
    assert "hunter2" not in built.shell()
    assert 'KVLOOP_WORKER_SECRET="${KVLOOP_WORKER_SECRET:?}"' in built.shell()


# --- the command line -------------------------------------------------------------------------------------------


def test_words_after_the_dashes_go_to_vllm() -> None:
    args = parse("decode", "m", "--port", "9000", "--", "--port", "1", "--max-model-len", "4096")
    assert (args.role, args.port, args.vllm_args) == ("decode", 9000, ("--port", "1", "--max-model-len", "4096"))


def test_without_dashes_nothing_goes_to_vllm() -> None:
    assert parse("prefill", "m").vllm_args == ()


def test_an_unknown_option_before_the_dashes_is_an_error() -> None:
    with pytest.raises(SystemExit):
        parse("prefill", "m", "--max-model-len", "4096")


@pytest.mark.parametrize(("role", "port", "side"), [("prefill", "8100", "5600"), ("decode", "8200", "5700")])
def test_both_roles_start_side_by_side_without_options(
    role: str, port: str, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(parse(role, "m", "--device", "cpu", "--print")) == 0
    words = shlex.split(capsys.readouterr().out)
    assert values(tuple(words), "--port") == [port]
    assert f"VLLM_NIXL_SIDE_CHANNEL_PORT={side}" in words


def test_a_missing_secret_is_one_line_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GATEWAY_SECRET", raising=False)
    assert main(parse("prefill", "m", "--device", "cpu", "--secret-env", "GATEWAY_SECRET", "--print")) == 1
    assert capsys.readouterr().err == (
        "kvloop worker: --secret-env names GATEWAY_SECRET, which is not set: export it, the same as the gateway's\n"
    )


def test_a_worker_becomes_the_command_it_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(launch, "check", lambda *_: None)
    monkeypatch.setenv("GATEWAY_SECRET", "s3")
    became: list[Any] = []
    monkeypatch.setattr(launch.os, "execvpe", lambda *call: became.append(call))
    main(parse("prefill", str(tmp_path), "--device", "cpu", "--secret-env", "GATEWAY_SECRET"))
    [(program, argv, env)] = became
    assert program == argv[0]
    assert env["KVLOOP_WORKER_SECRET"] == "s3"
    assert tuple(shlex.split(capsys.readouterr().err)[-len(argv) :]) == tuple(argv)


# --- what would make vLLM fail later ------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend vLLM, NIXL and every program are there; returns a model directory."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_good_command_passes_the_check(installed: Path) -> None:
    check(command(port=free_port(), side_channel_port=free_port()), str(installed))


@pytest.mark.parametrize("name", ["vllm", "nixl"])
def test_a_missing_package_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else asked)
    with pytest.raises(LaunchError, match=f"(?i){name} is not installed: `make setup`"):
        check(command(), str(installed))


def test_a_missing_program_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(LaunchError, match="taskset is not on PATH: install util-linux or drop --cpu-core"):
        check(command(cpu_core=0), str(installed))


def test_a_directory_that_is_no_model_is_named(installed: Path) -> None:
    with pytest.raises(LaunchError, match="is no model directory"):
        check(command(), str(installed / "nowhere"))


@pytest.mark.parametrize("config", ["", "{", "[]", "{}"])
def test_a_half_downloaded_model_is_named(installed: Path, config: str) -> None:
    (installed / "config.json").write_text(config)
    with pytest.raises(LaunchError, match=r"config\.json describes no model"):
        check(command(), str(installed))


def test_a_core_that_is_not_there_is_named(installed: Path) -> None:
    with pytest.raises(LaunchError, match=r"there is no core 4711: give --cpu-core one of \d+"):
        check(command(cpu_core=4711), str(installed))


def test_cuda_on_the_cpu_build_is_refused(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.32.0")
    with pytest.raises(LaunchError, match="this vLLM is the CPU build: drop --device cuda"):
        check(command(device="cuda"), str(installed))


def test_vllms_own_options_belong_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("prefill", "m", "--max-model-len", "100")
    assert "kvloop worker ROLE MODEL -- --max-model-len 100" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--port", "--side-channel-port"])
def test_a_busy_port_is_named_with_its_option(installed: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        ports = {"--port": free_port(), "--side-channel-port": free_port(), option: busy}
        built = command(port=ports["--port"], side_channel_port=ports["--side-channel-port"])
        with pytest.raises(LaunchError, match=f"127.0.0.1:{busy} cannot be bound .*: give another {option}$"):
            check(built, str(installed))


def test_a_port_vllm_refuses_is_named(installed: Path) -> None:
    with pytest.raises(LaunchError, match="port 80 is refused by vLLM"):
        check(command(port=80), str(installed))


def test_the_users_port_is_the_one_checked(installed: Path) -> None:
    with pytest.raises(LaunchError, match="port 81 is refused"):
        check(command(extra=("--port=81",)), str(installed))


def test_a_host_that_is_not_ours_is_named(installed: Path) -> None:
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid is no address"):
        check(command(host="no-such-host.invalid"), str(installed))
