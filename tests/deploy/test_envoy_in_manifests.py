"""Whatever installs it, kvloop's filter has one shape: a wrong one gives mutilated bodies. And each serves real requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from endpoint_picker import EndpointPicker
from gateway_harness import worker
from manifest_gateway import (
    FILTER_CONFIG,
    ManifestGateway,
    Shape,
    envoy_gateway_shape,
    istio_shape,
    main_manager,
    patches,
    rendered_bootstrap,
    rendered_shape,
)
from manifests import KUBERNETES, overlay, pick
from test_manifests import settings_of

from extproc.envoy_binary import validate
from extproc.envoy_config import EXT_PROC_FILTER
from workers.sim.settings import Timing

SHAPES: dict[str, Callable[[], Shape]] = {
    "envoy-gateway": lambda: envoy_gateway_shape(overlay("envoy-gateway")),
    "inference-pool": lambda: istio_shape(overlay("inference-pool")),
    "istio": lambda: istio_shape(overlay("istio")),
}
MUST_STAY_ZERO = ("wrong_kv_turns", "poisoned_blocks_cached", "handles_used_twice", "handles_used_late")


def comparable(typed_config: dict[str, Any]) -> dict[str, Any]:
    """Return a filter's settings without what may differ: where the processor is, and how the mode is arrived at."""
    settings = json.loads(json.dumps(typed_config))
    del settings["processing_mode"]
    settings["grpc_service"].pop("envoy_grpc", None)
    settings["failure_mode_allow"] = settings.get("failure_mode_allow", False)
    code = settings["status_on_error"]["code"]
    settings["status_on_error"] = 503 if code == "ServiceUnavailable" else code
    retry = settings["grpc_service"]["retry_policy"]
    retry["host_selection_retry_max_attempts"] = int(retry.get("host_selection_retry_max_attempts", 0))
    return dict(settings)


@pytest.mark.parametrize("name", SHAPES)
def test_the_mode_on_a_handled_route_is_the_rendered_one(name: str) -> None:
    shape, reference = SHAPES[name](), rendered_shape()
    assert shape.mode == reference.mode
    # Nothing said is the role `gateway`, too.
    assert reference.role == "gateway"
    assert shape.role in {"gateway", None}


@pytest.mark.parametrize("name", ["istio", "inference-pool"])
def test_istios_filter_is_the_rendered_one(name: str) -> None:
    shape, reference = SHAPES[name](), rendered_shape()
    assert shape.http_filter["name"] == reference.http_filter["name"] == EXT_PROC_FILTER
    assert comparable(shape.http_filter["typed_config"]) == comparable(reference.http_filter["typed_config"])


def test_envoy_gateways_filter_is_the_rendered_one_less_what_its_policies_cannot_say() -> None:
    found = comparable(SHAPES["envoy-gateway"]().http_filter["typed_config"])
    expected = comparable(rendered_shape().http_filter["typed_config"])
    # components/envoy-gateway-patches adds it.
    assert expected.pop("stat_prefix") == "kvloop"
    # A retry may meet the same replica; nothing in kvloop's answers changes the route, so Envoy's default will do.
    del expected["grpc_service"]["retry_policy"]["retry_host_predicate"]
    expected["grpc_service"]["retry_policy"]["host_selection_retry_max_attempts"] = 0
    assert expected.pop("route_cache_action") == "RETAIN"
    assert found == expected


@pytest.mark.parametrize("name", ["istio", "inference-pool"])
def test_what_istio_merges_is_what_is_rendered(name: str) -> None:
    manifests = overlay(name)
    rendered = main_manager(rendered_bootstrap())
    merged_keys = set()
    for patch in patches(manifests, "NETWORK_FILTER"):
        manager = patch["patch"]["value"]["typed_config"]
        assert {key: rendered[key] for key in manager} == manager
        merged_keys |= set(manager)
        if "early_header_mutation_extensions" in manager:  # kvloop's own calls carry such headers
            assert patch["match"]["listener"]["portNumber"] in {80, 8080}
    assert {
        "stream_idle_timeout",
        "early_header_mutation_extensions",
        "path_with_escaped_slashes_action",
    } <= merged_keys
    clusters = {one["name"]: one for one in rendered_bootstrap()["static_resources"]["clusters"]}
    for patch in patches(manifests, "CLUSTER"):
        merged = patch["patch"]["value"]
        assert merged.pop("ignore_health_on_host_removal") is clusters["decode"]["ignore_health_on_host_removal"]
        assert merged["common_lb_config"].pop("healthy_panic_threshold") == {"value": 0}
        rendered_lb = {**clusters["decode"]["common_lb_config"]}
        assert rendered_lb.pop("healthy_panic_threshold") == {}  # a percentage of zero, as protobuf spells it
        assert merged == {"common_lb_config": rendered_lb}


def test_envoy_gateway_drops_the_same_headers_from_clients() -> None:
    extensions = main_manager(rendered_bootstrap())["early_header_mutation_extensions"]
    rendered = []
    for mutation in extensions[0]["typed_config"]["mutations"]:
        matcher = mutation.get("remove_on_match", {"key_matcher": {"exact": mutation.get("remove")}})["key_matcher"]
        ((kind, value),) = matcher.items()
        kinds = {"exact": "Exact", "prefix": "Prefix", "safe_regex": "RegularExpression"}
        rendered.append({"type": kinds[kind], "value": value["regex"] if kind == "safe_regex" else value})
    policy = pick(overlay("envoy-gateway"), "ClientTrafficPolicy", "kvloop")
    assert policy["spec"]["headers"]["earlyRequestHeaders"]["removeOnMatch"] == rendered


@pytest.mark.parametrize("name", ["envoy-gateway", "istio"])
def test_the_same_paths_are_refused(name: str) -> None:
    refused = {
        next(iter(route["match"].get("safe_regex", route["match"]).values()))
        for route in main_manager(rendered_bootstrap())["route_config"]["virtual_hosts"][0]["routes"]
        if route["name"] == "refused"
    }
    if name == "istio":
        routes = pick(overlay(name), "VirtualService", "kvloop")["spec"]["http"]
        (rule,) = [route for route in routes if "directResponse" in route]
        found = {next(iter(match["uri"].values())) for match in rule["match"]}
    else:
        (rule,) = pick(overlay(name), "HTTPRoute", "refused")["spec"]["rules"]
        found = {match["path"]["value"] for match in rule["matches"]}
    assert found == refused


def test_no_istio_route_keeps_istios_default_retries() -> None:
    for service in (pick(overlay("istio"), "VirtualService", name) for name in ("kvloop", "kvloop-prefill")):
        for route in service["spec"]["http"]:
            assert "directResponse" in route or route["retries"] == {"attempts": 0}, route["name"]


def test_the_standalone_pod_renders_a_configuration_envoy_takes(tmp_path: Path) -> None:
    manifests = overlay("standalone")
    pod = pick(manifests, "Deployment", "envoy")["spec"]["template"]["spec"]
    (init,) = pod["initContainers"]
    target = tmp_path / "envoy.yaml"
    arguments = [str(target) if argument == "/config/envoy.yaml" else argument for argument in init["args"]]
    environment = {**os.environ, **settings_of(manifests, "envoy-settings")}
    subprocess.run([sys.executable, "-m", "extproc.cli", *arguments], env=environment, check=True, timeout=60)
    bootstrap = yaml.safe_load(target.read_text())
    # As the tests run it, but for addresses.
    assert main_manager(bootstrap) == main_manager(rendered_bootstrap())
    ports = {port["containerPort"] for port in pod["containers"][0]["ports"]}
    listening = {one["address"]["socket_address"]["port_value"] for one in bootstrap["static_resources"]["listeners"]}
    assert listening == ports
    # Names resolve in the cluster only: the check is about everything else.
    validate(target.read_text().replace("STRICT_DNS", "LOGICAL_DNS"))


def start(directory: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> ManifestGateway:
    options = {"prefill": [worker("prefill")] * 2, "decode": [worker("decode")] * 2, **options}
    return ManifestGateway(directory, change=change, **options)


def two_turns(gateway: ManifestGateway, chat: Any) -> list[Any]:
    """Play two turns, streamed and not, and return the answers; each must be right."""
    answers = []
    for number, stream in enumerate((True, False)):
        answer = chat.say(f"turn {number} " + "word " * 600, stream=stream)
        expected = gateway.right_text(chat.messages[:-1], **chat.fields)
        assert (answer.status, answer.broken, answer.text) == (200, "", expected), answer.raw[:500]
        answers.append(answer)
    report = gateway.report()
    assert {key: report[key] for key in MUST_STAY_ZERO} == dict.fromkeys(MUST_STAY_ZERO, 0)
    return answers


@pytest.mark.gateway
@pytest.mark.parametrize("name", SHAPES)
def test_the_filter_serves_and_reuses(name: str, tmp_path: Path) -> None:
    with start(tmp_path, SHAPES[name]().put_into) as gateway:
        answers = two_turns(gateway, gateway.new_chat(max_tokens=40))
        assert [answer.outcome for answer in answers] == ["cold", "reused"], [a.receipt for a in answers]
        # Nothing kvloop has a use for: it leaves such an answer, and the rest must come whole.
        alone = gateway.chat(None, [{"role": "user", "content": "x " * 500}], n=2, max_tokens=60)
        assert (alone.status, alone.is_done, alone.outcome) == (200, True, "decode_only")
        models = gateway.request("GET", "/v1/models")
        assert (models.status, models.json["object"]) == (200, "list")
        refused = gateway.post("/v1/chat/completions", b"{")
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.gateway
def test_a_large_body_passes_an_endpoint_picker_and_kvloop_whole(tmp_path: Path) -> None:
    """Two full-duplex processors in one chain, the picker first, each with settings under its own filter's name."""
    shape = SHAPES["inference-pool"]()
    with EndpointPicker() as picker, ExitStack() as started:

        def change(bootstrap: dict[str, Any]) -> None:
            shape.put_into(bootstrap)
            put_picker_in_front(bootstrap, picker.port)

        gateway = started.enter_context(start(tmp_path, change))
        answers = two_turns(gateway, gateway.new_chat(max_tokens=40, metadata={"note": "x" * 1_500_000}))
        assert [answer.outcome for answer in answers] == ["cold", "reused"]
        assert len(picker.requests) == 2
        # In front of kvloop it sees what the client sent, and on the way back what the client gets.
        for answer, request, response in zip(answers, picker.requests, picker.responses, strict=True):
            assert b"kv_transfer_params" not in request
            assert response == answer.raw


def put_picker_in_front(bootstrap: dict[str, Any], port: int) -> None:
    """Do as Istio does for an InferencePool: its filter off, and full duplex both ways on the pool's routes."""
    manager = main_manager(bootstrap)
    name = "envoy.filters.http.ext_proc"
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3"
    picker = {"envoy_grpc": {"cluster_name": "picker"}}
    off = {"request_header_mode": "SKIP", "response_header_mode": "SKIP"}
    on = {f"{way}_{part}_mode": "SEND" for way in ("request", "response") for part in ("header", "trailer")}
    on |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
    typed = {"@type": f"{kind}.ExternalProcessor", "grpc_service": picker, "processing_mode": off}
    manager["http_filters"].insert(0, {"name": name, "typed_config": typed})
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        if route["match"].get("path") == route["name"]:
            route["typed_per_filter_config"][name] = {
                "@type": f"{kind}.ExtProcPerRoute",
                "overrides": {"processing_mode": on, "grpc_service": picker},
            }
    clusters = bootstrap["static_resources"]["clusters"]
    (mine,) = [one for one in clusters if one["name"] == "kvloop_extproc"]
    theirs = json.loads(json.dumps(mine).replace("kvloop_extproc", "picker"))
    del theirs["health_checks"]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    theirs["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    clusters.append(theirs)


@pytest.mark.gateway
def test_draining_waits_for_the_answers_that_run(tmp_path: Path) -> None:
    slow = worker("decode", timing=Timing(decode_tokens_per_second=20.0))
    with start(tmp_path, lambda _: None, decode=[slow]) as gateway:
        answers: list[Any] = []
        chat = threading.Thread(
            target=lambda: answers.append(
                gateway.chat(None, [{"role": "user", "content": "hi"}], min_tokens=60, max_tokens=60)
            )
        )
        chat.start()
        gateway.until(
            lambda: gateway.envoy_stats("http.main.downstream_rq_active").get("http.main.downstream_rq_active")
        )
        environment = {"PATH": os.environ["PATH"], "ADMIN_PORT": str(gateway.admin_port), "ENDPOINTS_SECONDS": "0"}
        script = KUBERNETES / "overlays/standalone/drain.sh"
        done = subprocess.run(["bash", script, "60"], env=environment, check=False, timeout=90, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert gateway.envoy_stats("http.main.downstream_rq_active") == {"http.main.downstream_rq_active": 0}
        chat.join(30)
        assert [answer.is_done for answer in answers] == [True]


def test_the_route_settings_switch_a_filter_on_that_is_off() -> None:
    """Both ways in use: an empty configuration (Envoy Gateway), and one with the mode (Istio)."""
    assert SHAPES["envoy-gateway"]().handled == {
        SHAPES["envoy-gateway"]().http_filter["name"]: {"@type": FILTER_CONFIG, "config": {}}
    }
    for name in ("istio", "inference-pool"):
        shape = SHAPES[name]()
        assert shape.http_filter["disabled"] is True
        settings = shape.handled or shape.virtual_host
        assert settings[EXT_PROC_FILTER]["@type"] == FILTER_CONFIG
