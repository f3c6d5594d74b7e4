"""``kvloop doctor`` finds nothing wrong where nothing is, and names each of the faults that are set up here, with its fix."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import HOST, Gateway, worker
from redis_harness import RedisServer

from extproc import envoy_binary
from workers.supervision import Component, inherited_environment


def doctor(gateway: Gateway, *options: str, url: str = "", **env: str | None) -> tuple[int, list[dict[str, str]]]:
    """Run the command with the settings of the gateway's first ext_proc (None: without that one); returns status and findings."""
    command = [sys.executable, "-m", "extproc.cli", "doctor", "--json", *options]
    where = ["--envoy-admin", f"{HOST}:{gateway.admin_port}", "--gateway", url or gateway.base_url]
    ran = subprocess.run(  # noqa: S603 - our own
        [*command, *where],
        env={name: value for name, value in {**gateway.extproc[0].env, **env}.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)["findings"]


def faults(findings: list[dict[str, str]]) -> list[str]:
    return [
        f"{finding['text']} -> {finding['fix']}" for finding in findings if finding["status"] in ("fault", "warning")
    ]


def test_nothing_is_wrong_where_nothing_is(start_gateway, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        gateway = start_gateway(extproc_env={"KVLOOP_STORE_URL": server.url})
        status, findings = doctor(gateway, "--probe")
        _, elsewhere = doctor(gateway, KVLOOP_STORE_URL=None)
    assert any("the two environments differ" in fault for fault in faults(elsewhere)), elsewhere
    assert faults(findings) == []
    assert status == 0
    told = [finding["text"] for finding in findings if finding["status"] == "ok"]
    assert any(text.startswith("the second turn reused") for text in told)
    unseen = [finding["part"].split()[0] for finding in findings if finding["status"] == "unseen"]
    assert unseen == ["prefill", "decode"], "what cannot be seen is not called right"


def test_what_was_not_tried_is_not_called_right(gateway) -> None:
    status, findings = doctor(gateway)
    assert status == 0
    assert [finding["part"] for finding in findings if finding["status"] == "unseen"][-1] == "probe"


def edit_envoy(edit: Callable[[str], str]) -> Callable[[Gateway], None]:
    """Run Envoy with an edited configuration."""

    def misconfigure(gateway: Gateway) -> None:
        assert gateway.envoy is not None
        gateway.envoy.stop()
        path = gateway.directory / "envoy.yaml"
        edited = edit(path.read_text())
        assert edited != path.read_text()
        path.write_text(edited)
        argv = tuple(envoy_binary.envoy_command(path, concurrency=1))
        gateway.envoy = Component(
            "Envoy", argv, inherited_environment(), gateway.directory / "envoy.log", grace_seconds=1.0
        )
        gateway.envoy.start()
        gateway.wait_until_routable()

    return misconfigure


def stop_prefill(gateway: Gateway) -> None:
    gateway.crash_worker(gateway.fleet.prefill[0])


def stop_envoy(gateway: Gateway) -> None:
    assert gateway.envoy is not None
    gateway.envoy.stop()
    admin = f"http://{HOST}:{gateway.extproc_admin_port()}"
    gateway.until(lambda: httpx.get(f"{admin}/readyz").status_code == 503, "the loss of the prefill listener")


def drain_decode(gateway: Gateway) -> None:
    gateway.new_chat().say("hello " * 50)
    (engine,) = gateway.debug_state()["engines"]
    httpx.delete(f"http://{HOST}:{gateway.extproc_admin_port()}/engines/{engine['address']}").raise_for_status()


PLAIN_D = worker("decode", streams_handles=False, digests_handles=False)
MISCONFIGURATIONS: dict[str, tuple[dict[str, Any], Callable[[Gateway], None] | None, str, str]] = {
    "P renders nothing": (
        {"prefill": [worker("prefill", scale_out=False)]},
        None,
        "does not render prompts",
        "--enable-scale-out",
    ),
    "D streams no handles": ({"decode": [PLAIN_D]}, None, "D streams no handles", "install kvloop beside vLLM"),
    "D names a loopback address": (
        {"extproc_env": {"KVLOOP_SINGLE_HOST": "false"}},
        None,
        "an address that means this machine",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
    ),
    "reuse is off": ({"extproc_env": {"KVLOOP_REUSE": "false"}}, None, "reuse is switched off", "unset KVLOOP_REUSE"),
    "block sizes differ": (
        {"prefill": [worker("prefill", engine={"block_size": 32})]},
        None,
        "KV block sizes differ: [16, 32]",
        "the same --block-size",
    ),
    "P is down": ({}, stop_prefill, "does not answer", "start it"),
    "ext_proc is down": ({}, Gateway.kill_extproc, "its admin port does not answer", "start `kvloop serve`"),
    "Envoy is down": ({}, stop_envoy, "is not ready: Envoy's prefill listener", "KVLOOP_PREFILL_URL"),
    "D was told to stop": ({}, drain_decode, "this D was told to stop", "restart D"),
    "Envoy fails open": (
        {},
        edit_envoy(
            lambda text: text.replace(
                "allow_mode_override: true", "allow_mode_override: true\n              failure_mode_allow: true"
            )
        ),
        "may be passed by when it fails",
        "failure_mode_allow: false",
    ),
    "Envoy buffers requests": (
        {},
        edit_envoy(
            lambda text: text.replace("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: STREAMED").replace(
                "request_trailer_mode: SEND", "request_trailer_mode: SKIP"
            )
        ),
        "request bodies do not come to ext_proc as it needs them",
        "FULL_DUPLEX_STREAMED",
    ),
    "Envoy retries": (
        {},
        edit_envoy(
            lambda text: text.replace(
                "timeout: 0s\n", "timeout: 0s\n                  retry_policy: {retry_on: 5xx}\n", 1
            )
        ),
        "would use a handle twice",
        "remove retry_policy",
    ),
}

PROBED = {
    "P renders nothing",
    "D streams no handles",
    "D names a loopback address",
    "reuse is off",
    "D was told to stop",
}


@pytest.mark.parametrize("name", MISCONFIGURATIONS)
def test_each_misconfiguration_is_named_with_its_fix(start_gateway, name: str) -> None:
    options, misconfigure, text, fix = MISCONFIGURATIONS[name]
    gateway = start_gateway(**options)
    if misconfigure is not None:
        misconfigure(gateway)
    status, findings = doctor(gateway, *(["--probe"] if name in PROBED else []))
    if name == "P is down":
        gateway.start_worker(gateway.fleet.prefill[0])
    assert status == 1
    assert any(text in fault and fix in fault for fault in faults(findings)), findings


STORES: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "password": (["--requirepass", "right"], {"KVLOOP_STORE_PASSWORD": "wrong"}, 1, "refused the login"),
    "eviction": (["--maxmemory-policy", "allkeys-lru"], {}, 0, "set maxmemory-policy noeviction"),
    "replica": (["--replicaof", f"{HOST} 1"], {}, 1, "point KVLOOP_STORE_URL at the primary"),
}


@pytest.mark.parametrize("name", STORES)
def test_each_fault_of_the_store_is_named_with_its_fix(gateway, tmp_path: Path, name: str) -> None:
    options, env, expected, told = STORES[name]
    with RedisServer(tmp_path, *options) as server:
        status, findings = doctor(gateway, KVLOOP_STORE_URL=server.url, **env)
    assert status == expected
    assert any(told in fault for fault in faults(findings)), findings


def test_a_store_that_is_away_is_named(gateway, tmp_path: Path) -> None:
    with ExitStack() as stopped:
        url = stopped.enter_context(RedisServer(tmp_path)).url
    status, findings = doctor(gateway, KVLOOP_STORE_URL=url)
    assert status == 1
    assert any("it is away" in fault for fault in faults(findings)), findings


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("--gateway", "127.0.0.1:8000", "a URL, like http://127.0.0.1:8000"),
        ("--envoy-admin", "http://127.0.0.1:9901", "HOST:PORT, without a scheme"),
    ],
)
def test_a_misspelt_address_is_misuse(option: str, given: str, told: str) -> None:
    command = [sys.executable, "-m", "extproc.cli", "doctor", option, given]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - our own
    assert (ran.returncode, ran.stdout) == (2, "")
    assert told in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_where_nothing_answers_the_probe_says_where(gateway) -> None:
    nowhere = f"http://{HOST}:1"
    status, findings = doctor(gateway, "--probe", url=nowhere)
    assert status == 1
    assert any(f"nothing answers at {nowhere}" in fault and "--gateway" in fault for fault in faults(findings)), (
        findings
    )
