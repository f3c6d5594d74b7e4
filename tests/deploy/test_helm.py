"""The Helm chart makes what the Kustomize overlay `standalone` makes, and takes the values it says it takes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_tools import find
from manifests import ROOT, Manifest, all_of, complaints, overlay, pick

CHART = ROOT / "deploy/helm/kvloop"
GENERATED = re.compile(r"\b(kvloop-settings|worker-settings|envoy-settings|envoy-drain)-[a-z0-9]{10}\b")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = find("helm")
    assert found is not None, "helm is missing: `make setup` brings one, or put any recent one on PATH"
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(tmp_path: Path, namespace: str = "kvloop", **values: Any) -> list[Manifest]:
    given = tmp_path / "values.yaml"
    given.write_text(json.dumps(values))
    done = helm("template", "kvloop", str(CHART), "--namespace", namespace, "--values", str(given))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_helm_has_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout


def comparable(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return manifests by kind and name, without hashes in names and checksums of settings: both start new pods."""
    plain = json.loads(GENERATED.sub(r"\1", json.dumps(manifests)))
    for deployment in all_of(plain, "Deployment"):
        deployment["spec"]["template"]["metadata"].pop("annotations", None)
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in plain if one["kind"] != "Namespace"}


def test_the_chart_makes_what_the_overlay_makes(tmp_path: Path) -> None:
    assert comparable(template(tmp_path)) == comparable(overlay("standalone"))


def test_values_reach_the_manifests(tmp_path: Path) -> None:
    manifests = template(
        tmp_path,
        "elsewhere",
        kvloop={"minReplicas": 3, "settings": {"KVLOOP_DRAIN_SECONDS": "60", "KVLOOP_REUSE": "false"}},
        workers={
            "model": "org/model",
            "ttlSeconds": 90,
            "args": ["--tensor-parallel-size=4", "--max-model-len=65536"],
            "capabilities": ["IPC_LOCK"],
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "decode": {"replicas": 5},
        },
    )
    assert {one["kind"]: what for one in manifests if (what := complaints(one))} == {}
    assert {one["metadata"]["namespace"] for one in manifests} == {"elsewhere"}
    settings = pick(manifests, "ConfigMap", "kvloop-settings")["data"]
    assert settings["KVLOOP_HANDLE_TTL_SECONDS"] == "90"
    assert settings["KVLOOP_REUSE"] == "false"
    assert settings["KVLOOP_PREFILL_URL"] == "http://envoy-private.elsewhere.svc.cluster.local:10001"
    assert pick(manifests, "Deployment", "kvloop")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    decode = pick(manifests, "Deployment", "decode")["spec"]
    assert decode["replicas"] == 5
    pod = decode["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "h100"}, [{"key": "gpu", "operator": "Exists"}])
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    end = container["args"].index("--")
    assert "--ttl=90" in container["args"][:end]
    assert container["args"][end + 1 :] == ["--tensor-parallel-size=4", "--max-model-len=65536"]


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 3},
        {"workers": {"ttlSeconds": 30}},
        {"workers": {"decode": {"replicas": "two"}}},
        {"kvloop": {"settings": {"REUSE": "false"}}},
        {"kvloop": {"settings": {"KVLOOP_REUSE": False}}},
        {"envoy": {"settings": {"KVLOOP_REUSE": "false"}}},
        {"images": {"kvloop": ""}},
    ],
    ids=json.dumps,
)
def test_values_that_mean_nothing_are_refused(values: Any, tmp_path: Path) -> None:
    given = tmp_path / "values.yaml"
    given.write_text(json.dumps(values))
    done = helm("template", "kvloop", str(CHART), "--values", str(given))
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
