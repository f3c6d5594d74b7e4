"""The real Envoy with the ext_proc filter a manifest describes, around it what `kvloop envoy render` writes.

No control plane runs here. What Istio and Envoy Gateway make of these manifests is put together by hand, as far as it
concerns the filter: ``Shape`` says what of the rendered configuration a manifest replaces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from gateway_harness import Gateway
from manifests import Manifest, all_of, pick

from extproc.envoy_config import EXT_PROC_CLUSTER, EXT_PROC_FILTER, render
from extproc.settings import EnvoySettings

EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
FILTER_CONFIG = "type.googleapis.com/envoy.config.route.v3.FilterConfig"


@dataclass(frozen=True)
class Shape:
    """How kvloop's filter stands in an Envoy: the HTTP filter, and the settings of the handled routes for it."""

    http_filter: dict[str, Any]
    handled: dict[str, Any] = field(default_factory=dict)
    """``typed_per_filter_config`` of each handled route."""
    virtual_host: dict[str, Any] = field(default_factory=dict)
    """The same, of the virtual host: for all routes."""
    others: dict[str, Any] = field(default_factory=dict)
    """The same, of all other routes."""

    @property
    def mode(self) -> dict[str, Any]:
        """Return the processing mode that holds on a handled route, as far as it is not Envoy's default."""
        mode = self._overrides.get("processing_mode", self.http_filter["typed_config"]["processing_mode"])
        return {key: value for key, value in mode.items() if value != "NONE"}

    @property
    def role(self) -> str | None:
        """Return the role Envoy names to the processor on a handled route."""
        named = {one["key"]: one["value"] for one in self._overrides.get("grpc_initial_metadata", ())}
        return named.get("x-kvloop-role")

    @property
    def _overrides(self) -> dict[str, Any]:
        """Return what a handled route, or else the virtual host, says against the filter."""
        settings = {**self.virtual_host, **self.handled}.get(self.http_filter["name"], {})
        overrides: dict[str, Any] = settings.get("config", settings).get("overrides", {})
        return overrides

    def put_into(self, bootstrap: dict[str, Any]) -> None:
        """Replace kvloop's filter in a rendered bootstrap by this one."""
        manager = main_manager(bootstrap)
        mine = copy.deepcopy(self.http_filter)
        mine["typed_config"]["grpc_service"]["envoy_grpc"] = {"cluster_name": EXT_PROC_CLUSTER}
        (at,) = [index for index, one in enumerate(manager["http_filters"]) if one["name"] == EXT_PROC_FILTER]
        manager["http_filters"][at] = mine
        (host,) = manager["route_config"]["virtual_hosts"]
        host["typed_per_filter_config"] = copy.deepcopy(self.virtual_host)
        for route in host["routes"]:
            is_handled = route["match"].get("path") == route["name"]
            route["typed_per_filter_config"] = copy.deepcopy(self.handled if is_handled else self.others)


def rendered_bootstrap() -> dict[str, Any]:
    """Return what `kvloop envoy render` writes, as data."""
    loaded: dict[str, Any] = yaml.safe_load(render(EnvoySettings()))
    return loaded


def main_manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """Return the connection manager clients meet."""
    (listener,) = [one for one in bootstrap["static_resources"]["listeners"] if one["name"] == "main"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def rendered_shape() -> Shape:
    """Return the shape all others are compared with."""
    manager = main_manager(rendered_bootstrap())
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    return Shape(
        next(one for one in manager["http_filters"] if one["name"] == EXT_PROC_FILTER),
        handled=next(route for route in routes if route["name"] == "/v1/completions")["typed_per_filter_config"],
        others=next(route for route in routes if route["name"] == "untouched")["typed_per_filter_config"],
    )


def patches(manifests: list[Manifest], apply_to: str) -> list[dict[str, Any]]:
    """Return the patches of the one EnvoyFilter that apply to this kind of thing."""
    (envoy_filter,) = all_of(manifests, "EnvoyFilter")
    return [one for one in envoy_filter["spec"]["configPatches"] if one["applyTo"] == apply_to]


def istio_shape(manifests: list[Manifest]) -> Shape:
    """Return what an EnvoyFilter makes: one filter, off but for the routes or the virtual host that switch it on."""
    (inserted,) = [patch["patch"]["value"] for patch in patches(manifests, "HTTP_FILTER")]
    key = "typed_per_filter_config"
    routes = [one["patch"]["value"] for one in patches(manifests, "HTTP_ROUTE") if key in one["patch"]["value"]]
    hosts = [one["patch"]["value"][key] for one in patches(manifests, "VIRTUAL_HOST")]
    assert all(route == routes[0] for route in routes)
    return Shape(inserted, handled=routes[0][key] if routes else {}, virtual_host=hosts[0] if hosts else {})


def envoy_gateway_shape(manifests: list[Manifest]) -> Shape:
    """Return what Envoy Gateway 1.9 makes of the EnvoyExtensionPolicy.

    It puts the whole mode at the filter, switches the filter off, and on again with an empty configuration on the routes
    the policy targets. Headers are sent where ``request`` or ``response`` is there, trailers with full duplex only.
    """
    policy = pick(manifests, "EnvoyExtensionPolicy", "kvloop")
    (processor,) = policy["spec"]["extProc"]
    modes = {"FullDuplexStreamed": "FULL_DUPLEX_STREAMED", "Streamed": "STREAMED"}
    mode: dict[str, Any] = {}
    for direction in ("request", "response"):
        body = modes[processor["processingMode"][direction]["body"]]
        mode |= {f"{direction}_header_mode": "SEND", f"{direction}_body_mode": body}
        mode[f"{direction}_trailer_mode"] = "SEND" if body == "FULL_DUPLEX_STREAMED" else "SKIP"
    retry = processor["backendSettings"]["retry"]
    name = f"envoy.filters.http.ext_proc/envoyextensionpolicy/kvloop/{policy['metadata']['name']}/extproc/0"
    typed = {
        "@type": EXT_PROC,
        "grpc_service": {
            "retry_policy": {
                "retry_on": ",".join(retry["retryOn"]["triggers"]),
                "num_retries": retry["numRetries"],
                "retry_back_off": {"base_interval": "0.020s", "max_interval": "0.200s"},
            }
        },
        "processing_mode": mode,
        "message_timeout": processor["messageTimeout"],
        "allow_mode_override": processor["processingMode"]["allowModeOverride"],
        "failure_mode_allow": processor["failOpen"],
        "status_on_error": {"code": processor["statusOnError"]},
        "request_attributes": processor["processingMode"]["request"]["attributes"],
        "response_attributes": processor["processingMode"]["response"]["attributes"],
        "metadata_options": {"receiving_namespaces": {"untyped": processor["metadata"]["writableNamespaces"]}},
    }
    return Shape(
        {"name": name, "disabled": True, "typed_config": typed},
        handled={name: {"@type": FILTER_CONFIG, "config": {}}},
    )


class ManifestGateway(Gateway):
    """The gateway of the harness, its Envoy configuration changed before Envoy starts."""

    def __init__(self, *args: Any, change: Callable[[dict[str, Any]], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._change = change

    def _write_envoy_configuration(self) -> None:
        super()._write_envoy_configuration()
        path = self.directory / "envoy.yaml"
        bootstrap = yaml.safe_load(path.read_text())
        self._change(bootstrap)
        path.write_text(yaml.safe_dump(bootstrap))
