"""Render deploy/kubernetes as `kubectl kustomize` does, and check what comes out without a cluster.

Kubernetes' own kinds are checked by ``kubernetes-validate`` in its strict mode. For custom resources this module does what
the API server does with a CustomResourceDefinition: unknown fields are errors, types and limits hold, and the rules in
``x-kubernetes-validations`` (CEL) are evaluated, after defaults have been filled in. ``schemas/README.md`` says where the
schemas come from.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate
import yaml
from celpy.adapter import json_to_cel
from cluster_tools import find

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES_VERSION = "1.35"

OVERLAYS = tuple(sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml")))
COMPONENTS = tuple(sorted(path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml")))

Manifest = dict[str, Any]


def kubectl() -> Path:
    """Return the kubectl to render with; fails with the remedy."""
    found = find("kubectl")
    assert found is not None, "kubectl is missing: `make setup` brings one, or put any recent one on PATH"
    return found


@functools.cache
def _rendered(directory: Path) -> str:
    command = [str(kubectl()), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


def render(directory: Path) -> list[Manifest]:
    """Return the manifests a kustomization makes."""
    return [document for document in yaml.safe_load_all(_rendered(directory)) if document]


def overlay(name: str) -> list[Manifest]:
    """Return the manifests of one overlay."""
    return render(KUBERNETES / "overlays" / name)


def with_component(directory: Path, base: str, *components: str) -> list[Manifest]:
    """Return overlay ``base`` with components on top; ``directory`` is where the kustomization is written."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [_from(directory, KUBERNETES / "overlays" / base)],
        "components": [_from(directory, KUBERNETES / "components" / name) for name in components],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    return render(directory)


def _from(directory: Path, target: Path) -> str:
    return os.path.relpath(target.resolve(), directory.resolve())


def pick(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the one manifest of that kind and name; kustomize's hash suffix of generated names may be left out."""
    generated = re.compile(re.escape(name) + r"(-[a-z0-9]{10})?")
    (found,) = [one for one in all_of(manifests, kind) if generated.fullmatch(one["metadata"]["name"])]
    return found


def all_of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the manifests of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


# --- checking -------------------------------------------------------------------------------------------------------


def complaints(manifest: Manifest) -> list[str]:
    """Return what an API server would object to; empty for a good manifest."""
    return _complaints(json.dumps(manifest))


@functools.cache
def _complaints(text: str) -> list[str]:
    """Look at each manifest once: most are the same in every overlay."""
    manifest = json.loads(text)
    schema_file = SCHEMAS / f"{manifest['apiVersion'].replace('/', '_')}_{manifest['kind']}.json"
    if schema_file.exists():
        return _custom(manifest, schema_file)
    group = manifest["apiVersion"].rpartition("/")[0]
    if "." in group and not group.endswith(("networking.k8s.io", "rbac.authorization.k8s.io")):
        return [f"no schema for {manifest['apiVersion']} {manifest['kind']}: see tests/deploy/schemas"]
    try:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'/'.join(map(str, error.path))}: {error.message}"]
    return []


def _custom(manifest: Manifest, schema_file: Path) -> list[str]:
    declared, closed = _schemas(schema_file)
    found = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(closed).iter_errors(manifest)
    ]
    if found:
        return found
    complete = copy.deepcopy(manifest)
    _fill_defaults(declared, complete)
    return list(_broken_rules(declared, complete, ""))


@functools.cache
def _schemas(schema_file: Path) -> tuple[Any, Any]:
    """Return the schema as declared, and as jsonschema needs it to refuse what the API server refuses."""
    declared = json.loads(schema_file.read_text())
    closed = _close(copy.deepcopy(declared))
    closed["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": _METADATA}
    return declared, closed


_METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def _close(schema: Any) -> Any:
    """Turn a structural OpenAPI schema into one that refuses unknown fields."""
    if isinstance(schema, list):
        return [_close(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in {"default", "enum"} else _close(value) for key, value in schema.items()}
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("type", None)
        closed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    # "properties" may also be the name of a property; only beside a type is it the keyword.
    is_object = isinstance(closed.get("properties"), dict) and closed.get("type") == "object"
    if is_object and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def _fill_defaults(schema: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                _fill_defaults(inner, value[name])
    elif isinstance(value, list):
        for item in value:
            _fill_defaults(schema.get("items", {}), item)


def _broken_rules(schema: Any, value: Any, path: str) -> Any:
    """Yield the messages of the CEL rules that do not hold. Rules about changes (``oldSelf``) have nothing to say here."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _program(rule["rule"]).evaluate({"self": json_to_cel(value)}):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties")
        for name, inner in value.items():
            if name in properties:
                yield from _broken_rules(properties[name], inner, f"{path}/{name}")
            elif isinstance(others, dict):
                yield from _broken_rules(others, inner, f"{path}/{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, f"{path}/{index}")


@functools.cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions=[split])


def split(text: Any, separator: Any) -> Any:
    """Do what Kubernetes' own addition to CEL of that name does."""
    return celpy.celtypes.ListType([celpy.celtypes.StringType(part) for part in text.split(separator)])
