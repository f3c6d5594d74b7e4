"""compose.yaml is one Compose takes, says what the command line understands, and its simulated stack works.

No Docker runs here. The stack is started as processes: each service under a loopback address of its own, with its own command,
environment and ports, names replaced by those addresses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import jsonschema
import pytest
import yaml
from manifests import ROOT, SCHEMAS
from test_dockerfiles import GATEWAY, environment
from test_manifests import variables

from extproc import cli
from extproc.envoy_binary import find_envoy
from extproc.settings import GatewaySettings
from workers.launch import kv_transfer_config
from workers.supervision import Component, inherited_environment, stop_all

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
GIVEN = {"KVLOOP_WORKER_SECRET": "hush", "MODEL": "org/model"}
PATIENCE_SECONDS = 60.0


def interpolated(text: str) -> str:
    """Fill in variables as Compose does: ``${NAME:-default}``, ``${NAME:?message}``."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if name in GIVEN:
            return GIVEN[name]
        assert kind == "-", f"{name} has no default"
        return str(rest)

    return re.sub(r"\$\{(\w+):([-?])((?:\$\$|[^}])*)\}", value, text)


def command(name: str) -> list[str]:
    return [interpolated(str(word)) for word in SERVICES[name]["command"]]


def settings(name: str) -> dict[str, str]:
    return {key: interpolated(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}


def test_compose_takes_the_file() -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())
    assert [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(COMPOSE)] == []


def test_every_service_is_locked_down_and_builds_from_a_file_that_is_there() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if "build" in service:
            assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    # Nothing but the client listener leaves the machine's loopback, and that only if you say so.
    assert [port for service in SERVICES.values() for port in service.get("ports", ())] == ["127.0.0.1:10000:10000"]


def test_dependencies_and_volumes_are_there() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(COMPOSE["volumes"]), name
        waits = {other for other, how in service.get("depends_on", {}).items() if how["condition"] == "service_healthy"}
        # The gateway image brings a health check of its own.
        assert all("healthcheck" in SERVICES[other] or other == "extproc" for other in waits), name


def test_the_settings_exist() -> None:
    known = variables(GatewaySettings) | {"HF_TOKEN", "UCX_TLS"}
    for name in SERVICES:
        assert set(settings(name)) <= known, name


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_gpu_worker_becomes_the_right_vllm(
    role: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"gpu-{role}"
    for variable, value in settings(name).items():
        monkeypatch.setenv(variable, value)
    assert cli.main(["worker", *command(name), "--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("serve") + 1] == GIVEN["MODEL"]
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={name}" in words
    expected = kv_transfer_config(role, device="cuda")
    assert json.loads(words[words.index("--kv-transfer-config") + 1]) == expected


# --- the simulated stack --------------------------------------------------------------------------------------------


class Stack:
    """The services of profile ``sim`` as processes; ``extproc`` twice. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses: dict[str, list[str]] = {}
        """Of each service, and of each network alias, as Compose's name server would answer."""
        for name in self.services:
            own = [_loopback_address() for _ in range(SERVICES[name].get("deploy", {}).get("replicas", 1))]
            aliases = SERVICES[name].get("networks", {}).get("default", {}).get("aliases", ())
            for known_as in (name, *aliases):
                self.addresses[known_as] = self.addresses.get(known_as, []) + own
        self._components: list[Component] = []

    @property
    def services(self) -> list[str]:
        return [name for name, service in SERVICES.items() if "sim" in service.get("profiles", ["sim"])]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._components[::-1])

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.directory.glob("*.log")))

    def _start(self) -> None:
        redis = shutil.which("redis-server") or shutil.which("valkey-server")
        assert redis is not None, "redis-server is missing: on Debian, apt-get install redis-server"
        kvloop = [sys.executable, "-m", "extproc.cli"]
        (envoy,) = self.addresses["envoy"]
        self.addresses["render"] = [envoy]  # whose addresses it writes down
        for name in self.services:
            for number, address in enumerate(self.addresses[name]):
                words = [local for word in command(name) for local in self._local(word, address)]
                if name == "redis":
                    self._run(name, [redis, *words[1:], "--bind", address])
                elif name == "render":
                    admin = {
                        "KVLOOP_ENVOY_ADMIN_LISTEN": f"{envoy}:9901"
                    }  # loopback's is taken by whoever tests beside us
                    subprocess.run([*kvloop, *words], check=True, timeout=60, env={**inherited_environment(), **admin})
                elif name != "envoy":  # which wants the configuration first
                    self._run(f"{name}-{number}", [*kvloop, *words], self._environment(name, address))
        words = [local for word in command("envoy") for local in self._local(word, envoy)]
        self._run("envoy", [str(find_envoy()), *words, "--concurrency", "1"])

    def _environment(self, name: str, address: str) -> dict[str, str]:
        image = {key: value for key, value in environment(GATEWAY).items() if key.startswith("KVLOOP_")}
        local = {key: self._local(value, address)[0] for key, value in {**image, **settings(name)}.items()}
        return {**local, "KVLOOP_SINGLE_HOST": "true"}  # as far as it knows, all share one machine

    def _local(self, word: str, own: str) -> list[str]:
        """Replace wildcard addresses, paths and names; an option whose value is a name of several addresses gets all."""
        word = word.replace("0.0.0.0", own).replace("/config/", f"{self.directory}/")
        match = re.search(r"(?<=[=/])[a-z][a-z0-9-]*(?=:\d|$)", word)
        if match is None or match.group() not in self.addresses:
            return [word]
        found = self.addresses[match.group()]
        if len(found) == 1:
            return [word[: match.start()] + found[0] + word[match.end() :]]
        return [word[: match.start() - 1], *(address + word[match.end() :] for address in found)]

    def _run(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        component = Component(
            name=name,
            argv=tuple(argv),
            env={**inherited_environment(), **(env or {})},
            log=self.directory / f"{name}.log",
            grace_seconds=5.0,
        )
        component.start()
        self._components.append(component)


def _loopback_address() -> str:
    """Return an address of the loopback network at random: all of its ports are free, whoever tests beside us."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


def ask(address: str, messages: list[dict[str, str]], conversation: str) -> tuple[int, str, str]:
    """Post a chat turn; return status, receipt and text."""
    body = json.dumps({"model": "sim", "messages": messages, "max_tokens": 30})
    with contextlib.closing(http.client.HTTPConnection(address, 10000, timeout=30)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"x-conversation-id": conversation})
        response = connection.getresponse()
        answer = json.loads(response.read())
        text = answer["choices"][0]["message"]["content"] if response.status == 200 else ""
        return response.status, response.getheader("x-kvloop-receipt", ""), text


def until_served(stack: Stack) -> None:
    """Wait until Envoy listens and holds enough of its upstreams for healthy."""
    (address,) = stack.addresses["envoy"]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ask(address, [{"role": "user", "content": "ready?"}], "another")[0] == http.client.OK:
                return
        time.sleep(0.1)
    raise AssertionError(f"not served after {PATIENCE_SECONDS} s\n{stack.logs()}")


@pytest.mark.gateway
def test_the_simulated_stack_serves_and_its_replicas_share_conversations(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        until_served(stack)
        (address,) = stack.addresses["envoy"]
        messages: list[dict[str, str]] = []
        receipts = []
        for turn in range(5):  # in turns over both replicas
            messages.append({"role": "user", "content": f"turn {turn} " + "word " * 100})
            status, receipt, text = ask(address, messages, "compose")
            assert status == http.client.OK, stack.logs()
            messages.append({"role": "assistant", "content": text})
            receipts.append(receipt)
        outcomes = [receipt.partition(",")[0] for receipt in receipts]
        assert outcomes == ["outcome=cold", *["outcome=reused"] * 4], f"{receipts}\n{stack.logs()}"
