"""Every manifest is one an API server takes, hangs together with the others, and says what the code understands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import COMPONENTS, KUBERNETES, OVERLAYS, Manifest, all_of, complaints, overlay, pick, with_component
from pydantic_settings import BaseSettings

from extproc import cli
from extproc.settings import EnvoySettings, GatewaySettings
from workers.launch import kv_transfer_config

SECRETS = {"kvloop-worker-secret": {"secret"}, "hugging-face": {"token"}, "kvloop-store": {"password"}}
"""Made by hand, as deploy/README.md says; everything else the manifests refer to is among them."""

NEEDED_BASE = {"envoy-gateway-patches": "envoy-gateway"}
"""Components that fit one overlay only."""


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_api_server_would_take_every_manifest(name: str) -> None:
    assert refused(overlay(name)) == {}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_fits_on_its_overlay(component: str, tmp_path: Path) -> None:
    base = NEEDED_BASE.get(component, "standalone")
    manifests = with_component(tmp_path, base, component)
    assert refused(manifests) == {}
    assert manifests != overlay(base)


def refused(manifests: list[Manifest]) -> dict[str, list[str]]:
    found = {f"{manifest['kind']}/{manifest['metadata']['name']}": complaints(manifest) for manifest in manifests}
    return {who: what for who, what in found.items() if what}


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("extProc", 0, "failOpen"), True, "FailOpen must be false"),
        (("extProc", 0, "messageTimout"), "5s", "messageTimout"),
        (("extProc", 0, "messageTimeout"), "5", "does not match"),
        (("extProc", 0, "statusOnError"), 200, "200"),
    ],
)
def test_the_check_refuses_what_the_api_server_refuses(path: tuple[Any, ...], value: Any, complaint: str) -> None:
    policy = json.loads(json.dumps(pick(overlay("envoy-gateway"), "EnvoyExtensionPolicy", "kvloop")))
    target = policy["spec"]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    assert complaint in " ".join(complaints(policy))


def test_the_check_refuses_a_misspelt_field_of_kubernetes_own_kinds() -> None:
    deployment = json.loads(json.dumps(pick(overlay("standalone"), "Deployment", "kvloop")))
    deployment["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFileSystem"] = True
    assert "readOnlyRootFileSystem" in " ".join(complaints(deployment))


# --- they hang together ---------------------------------------------------------------------------------------------


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Any]]:
    for manifest in all_of(manifests, "Deployment"):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]


def containers(template: Any) -> list[Any]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_a_pod_refers_to_is_there(name: str) -> None:
    manifests = overlay(name)
    maps = {manifest["metadata"]["name"] for manifest in all_of(manifests, "ConfigMap")}
    for _, template in pods(manifests):
        volumes = template["spec"].get("volumes", [])
        assert {volume["configMap"]["name"] for volume in volumes if "configMap" in volume} <= maps
        for container in containers(template):
            assert {source["configMapRef"]["name"] for source in container.get("envFrom", ())} <= maps
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= {one["name"] for one in volumes}
            for variable in container.get("env", ()):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["key"] in SECRETS[reference["name"]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_policies_and_budgets_name_pods_and_ports_that_exist(name: str) -> None:
    manifests = overlay(name)
    templates = [template for _, template in pods(manifests)]

    def ports_of(selector: dict[str, str]) -> set[Any]:
        chosen = [t for t in templates if selector.items() <= t["metadata"]["labels"].items()]
        every = [port for t in chosen for container in containers(t) for port in container.get("ports", ())]
        return {port["name"] for port in every} | {port["containerPort"] for port in every}

    for service in all_of(manifests, "Service"):
        if service["metadata"]["namespace"] == "kvloop":
            wanted = {port["targetPort"] for port in service["spec"]["ports"]}
            assert wanted <= ports_of(service["spec"]["selector"]), service["metadata"]["name"]
    for policy in all_of(manifests, "NetworkPolicy"):
        labels = policy["spec"]["podSelector"].get("matchLabels", {})
        named = {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule.get("ports", ())}
        assert {port for port in named if isinstance(port, str)} <= ports_of(labels), policy["metadata"]["name"]
    for budget in all_of(manifests, "PodDisruptionBudget"):
        assert ports_of(budget["spec"]["selector"]["matchLabels"]), budget["metadata"]["name"]
    for scaler in all_of(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in pick(manifests, target["kind"], target["name"])["spec"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_is_locked_down(name: str) -> None:
    for deployment, template in pods(overlay(name)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, deployment
        assert spec["automountServiceAccountToken"] is False, deployment
        # Kubernetes would add KVLOOP_SERVICE_HOST and the like for a Service named kvloop.
        assert spec["enableServiceLinks"] is False, deployment
        for container in containers(template):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, deployment
            assert context["allowPrivilegeEscalation"] is False, deployment
            assert context["capabilities"]["drop"] == ["ALL"], deployment


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_the_data_plane_reaches_workers_and_only_kvloop_the_prefill_listener(name: str) -> None:
    manifests = overlay(name)
    (deny,) = [one for one in all_of(manifests, "NetworkPolicy") if one["spec"]["podSelector"] == {}]
    assert deny["spec"]["policyTypes"] == ["Ingress"]
    assert "ingress" not in deny["spec"]
    workers = pick(manifests, "NetworkPolicy", "workers")["spec"]
    assert all(rule.get("from") for rule in workers["ingress"])
    private = [
        rule
        for policy in all_of(manifests, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        if {port.get("port") for port in rule.get("ports", ())} & {"prefill", 10001}
    ]
    assert private
    for rule in private:
        assert [peer["podSelector"] for peer in rule["from"]] == [{"matchLabels": {"app": "kvloop"}}]


# --- they say what the code understands -----------------------------------------------------------------------------


def settings_of(manifests: list[Manifest], name: str) -> dict[str, str]:
    return dict(pick(manifests, "ConfigMap", name)["data"])


def variables(kind: type[BaseSettings]) -> set[str]:
    return {f"{kind.model_config['env_prefix']}{field.upper()}" for field in kind.model_fields}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_settings_exist_and_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = overlay(name)
    given = settings_of(manifests, "kvloop-settings")
    assert set(given) <= variables(GatewaySettings)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = GatewaySettings()
    pod = pick(manifests, "Deployment", "kvloop")["spec"]["template"]["spec"]
    assert settings.drain_seconds < pod["terminationGracePeriodSeconds"]
    assert f"--ttl={settings.handle_ttl_seconds:.0f}" in worker_arguments(manifests, "decode")


@pytest.mark.parametrize("name", ["standalone", "gateway-api"])
def test_envoys_settings_exist(name: str) -> None:
    assert set(settings_of(overlay(name), "envoy-settings")) <= variables(EnvoySettings)


def worker_arguments(manifests: list[Manifest], role: str) -> list[str]:
    return list(pick(manifests, "Deployment", role)["spec"]["template"]["spec"]["containers"][0]["args"])


def started(manifests: list[Manifest], role: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> list[str]:
    """Return the vLLM command a worker's container would become, as the real CLI makes it."""
    known = {**settings_of(manifests, "worker-settings"), "POD_IP": "10.1.2.3"}
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda match: known[match.group(1)], argument)
        for argument in worker_arguments(manifests, role)
    ]
    monkeypatch.setenv("KVLOOP_WORKER_SECRET", "hush")
    end = arguments.index("--")
    assert cli.main(["worker", *arguments[:end], "--print", *arguments[end:]]) == 0
    return shlex.split(capsys.readouterr().out)


@pytest.mark.parametrize("component", [None, "efa", "rdma"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_workers_container_becomes_the_right_vllm(
    role: Any,
    component: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = overlay("standalone") if component is None else with_component(tmp_path, "standalone", component)
    words = started(manifests, role, capsys, monkeypatch)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=10.1.2.3" in words
    assert "workers.guard.SecretGuard" in words
    configurations = [word.partition("=")[2] for word in words if word.startswith("--kv-transfer-config=")]
    configurations += [words[at + 1] for at, word in enumerate(words) if word == "--kv-transfer-config"]
    (configuration,) = map(json.loads, configurations)
    backends = configuration["kv_connector_extra_config"].pop("backends", None)
    assert backends == (["LIBFABRIC"] if component == "efa" else None)
    assert configuration == kv_transfer_config(role, device="cuda")


def test_no_manifest_names_a_variable_nobody_reads() -> None:
    text = "\n".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    known = variables(GatewaySettings) | variables(EnvoySettings)
    assert set(re.findall(r"\bKVLOOP_[A-Z0-9_]*[A-Z0-9]\b", text)) <= known
