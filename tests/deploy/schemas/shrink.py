"""Cut CustomResourceDefinitions down to what a check needs: ``python shrink.py crds/*.yaml``.

Descriptions, status and list annotations go, so do kinds the manifests here do not use; types, limits, defaults and CEL
rules stay. Of EnvoyProxy, ten times the size of all others, only what is used stays: the rest is refused as unknown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KINDS = {
    "gateway.envoyproxy.io": {
        "BackendTrafficPolicy",
        "ClientTrafficPolicy",
        "EnvoyExtensionPolicy",
        "EnvoyPatchPolicy",
        "EnvoyProxy",
        "HTTPRouteFilter",
    },
    "gateway.networking.k8s.io": {"Gateway", "GatewayClass", "HTTPRoute"},
    "inference.networking.k8s.io": {"InferencePool"},
    "networking.istio.io": {"DestinationRule", "EnvoyFilter", "Gateway", "VirtualService"},
    "security.istio.io": {"PeerAuthentication"},
}
DROPPED = ("format", "x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-map-type")
KEPT_OF = {"EnvoyProxy": {"spec": {"provider": {"type": {}, "kubernetes": {"envoyService": {"name": {}, "type": {}}}}}}}


def shrink(schema: Any) -> Any:
    """Drop what says nothing about validity."""
    if isinstance(schema, list):
        return [shrink(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    literal = ("default", "enum", "x-kubernetes-validations")
    return {
        key: value if key in literal else shrink(value)
        for key, value in schema.items()
        if key not in DROPPED and not (key == "description" and isinstance(value, str))
    }


def keep(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Keep only the named properties, and of those the named ones; rules about the others go with them."""
    if wanted:
        schema["properties"] = {name: schema["properties"][name] for name in wanted}
        schema.pop("x-kubernetes-validations", None)
        for name, inner in wanted.items():
            keep(schema["properties"][name], inner)


def main(paths: list[str]) -> None:
    """Write one file per kind beside this script."""
    for path in paths:
        for crd in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
            if kind not in KINDS.get(group, ()):
                continue
            served = {version["name"]: version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"]}
            version = max(served, key=lambda name: ("alpha" not in name, "beta" not in name))
            schema = shrink(served[version])
            schema["properties"].pop("status", None)
            keep(schema, KEPT_OF.get(kind, {}))
            target = Path(__file__).with_name(f"{group}_{version}_{kind}.json")
            target.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
