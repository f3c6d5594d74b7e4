"""Settings: read once, checked at once, and wrong ones stop the start."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from extproc import settings as module
from extproc.settings import EnvoySettings, GatewaySettings, as_markdown, problems, unknown_variables


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(module_environment()):
        monkeypatch.delenv(name)


def module_environment() -> list[str]:
    import os  # noqa: PLC0415 - nothing else here may look at the environment

    return [name for name in os.environ if name.upper().startswith("KVLOOP_")]


def test_the_defaults_are_a_working_configuration() -> None:
    settings = GatewaySettings()
    assert settings.conversation_headers == ("x-conversation-id", "x-session-id")
    assert settings.handle_margin_seconds < settings.handle_ttl_seconds
    assert settings.worker_secret is None
    assert EnvoySettings().prefill == ("127.0.0.1:8100",)


def test_gateway_and_envoy_agree_by_default_where_they_meet() -> None:
    gateway, envoy = GatewaySettings(), EnvoySettings()
    assert gateway.listen in envoy.extproc
    assert gateway.prefill_url == f"http://{envoy.prefill_listen}"


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("KVLOOP_PREFILL_TIMEOUT_SECONDS", "60", "prefill_timeout_seconds", 60.0),
        ("KVLOOP_CONVERSATION_HEADERS", '["x-chat-id"]', "conversation_headers", ("x-chat-id",)),
        ("KVLOOP_CONVERSATION_FIELDS", "[]", "conversation_fields", ()),
        ("KVLOOP_REUSE", "false", "reuse", False),
        ("KVLOOP_DECODE_BLOCK_SIZE_TOKENS", "16", "decode_block_size_tokens", 16),
        ("KVLOOP_LISTEN", "[::1]:50051", "listen", "[::1]:50051"),
        ("KVLOOP_LISTEN", "kvloop.svc:0", "listen", "kvloop.svc:0"),
        ("KVLOOP_PREFILL_URL", "https://envoy:10001", "prefill_url", "https://envoy:10001"),
        ("KVLOOP_SEQUENCE_SOURCE", "digest", "sequence_source", "digest"),
    ],
)
def test_a_variable_sets_its_field(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str, expected: Any
) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(GatewaySettings(), field) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVLOOP_WORKER_SECRET", "from-a-file\n"),
        ("KVLOOP_WORKER_API_KEY", "a\rb"),
        ("KVLOOP_LISTEN", "50051"),
        ("KVLOOP_LISTEN", "host"),
        ("KVLOOP_LISTEN", "host:"),
        ("KVLOOP_LISTEN", ":50051"),
        ("KVLOOP_LISTEN", "::1:50051"),
        ("KVLOOP_LISTEN", "host:65536"),
        ("KVLOOP_LISTEN", "host:999999"),
        ("KVLOOP_LISTEN", "host:٣٣"),
        ("KVLOOP_LISTEN", "host:80\n"),
        ("KVLOOP_ADMIN_LISTEN", "http://host:80"),
        ("KVLOOP_PREFILL_URL", "envoy:10001"),
        ("KVLOOP_PREFILL_URL", "http://envoy:10001/"),
        ("KVLOOP_PREFILL_URL", "http://en voy"),
        ("KVLOOP_PREFILL_TIMEOUT_SECONDS", "0"),
        ("KVLOOP_PREFILL_TIMEOUT_SECONDS", "soon"),
        ("KVLOOP_MIN_REUSE_TOKENS", "0"),
        ("KVLOOP_STORE_MAX_BYTES", "-1"),
        ("KVLOOP_REUSE", "perhaps"),
        ("KVLOOP_SEQUENCE_SOURCE", "magic"),
        ("KVLOOP_LOG_LEVEL", "loud"),
        ("KVLOOP_HANDLE_MARGIN_SECONDS", "480"),
        ("KVLOOP_HANDLE_TTL_SECONDS", "29"),
    ],
)
def test_a_wrong_value_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError):
        GatewaySettings()


def test_a_list_that_is_not_json_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_CONVERSATION_HEADERS", "x-chat-id")
    with pytest.raises(SettingsError):
        GatewaySettings()


def test_a_margin_that_leaves_no_time_is_explained() -> None:
    with pytest.raises(ValidationError, match=r"KVLOOP_HANDLE_MARGIN_SECONDS \(30.0\) must be below KVLOOP_HANDLE_TTL"):
        GatewaySettings(handle_ttl_seconds=30)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVLOOP_ENVOY_PREFILL", "[]"),
        ("KVLOOP_ENVOY_DECODE", '["nowhere"]'),
        ("KVLOOP_ENVOY_HASH_BALANCE_FACTOR", "99"),
        ("KVLOOP_ENVOY_REFUSED_PATHS", '["no-slash"]'),
        ("KVLOOP_ENVOY_CONCURRENCY", "0"),
    ],
)
def test_a_wrong_envoy_value_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError):
        EnvoySettings()


def test_the_two_kinds_of_settings_have_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("KVLOOP_ENVOY_LISTEN", "127.0.0.1:2")
    assert (GatewaySettings().listen, EnvoySettings().listen) == ("127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("KVLOOP_CONVERSATON_HEADERS", "; did you mean KVLOOP_CONVERSATION_HEADERS?"),
        ("kvloop_reusee", "; did you mean KVLOOP_REUSE?"),
        ("KVLOOP_ENVOY_PREFIL", "; did you mean KVLOOP_ENVOY_PREFILL?"),
        ("KVLOOP_XYZZY", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_told_with_the_nearest_one(name: str, line: str) -> None:
    assert unknown_variables([name, "PATH"]) == [f"{name} is no setting and has no effect{line}"]


def test_settings_workers_variables_and_kubernetes_own_are_not_told() -> None:
    known = [f"KVLOOP_{name}".upper() for name in GatewaySettings.model_fields]
    workers = ["KVLOOP_PLUGIN_DIGEST", "KVLOOP_CACHE", "KVLOOP_WORKER_SECRET"]
    kubernetes = [
        "KVLOOP_SERVICE_HOST",
        "KVLOOP_PORT",
        "KVLOOP_PORT_50051_TCP_ADDR",
        "KVLOOP_EXTPROC_SERVICE_PORT_GRPC",
    ]
    assert unknown_variables([*known, *workers, *kubernetes]) == []


def test_each_problem_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_LISTEN", "nowhere")
    monkeypatch.setenv("KVLOOP_ENVOY_LISTEN", "nowhere")
    lines = []
    for kind in (GatewaySettings, EnvoySettings):
        with pytest.raises(ValidationError) as caught:
            kind()
        lines += problems(caught.value)
    words = "must be host:port (an IPv6 host in brackets), like 127.0.0.1:50051"
    assert lines == [f"KVLOOP_LISTEN: {words}", f"KVLOOP_ENVOY_LISTEN: {words}"]


def test_a_pattern_finds_a_conversation_or_stops_the_start() -> None:
    pattern = "^(?P<conversation>.+)--"
    assert GatewaySettings(conversation_patterns={"x-request-id": pattern}).conversation_patterns == {
        "x-request-id": pattern
    }
    for wrong, complaint in (("(", "must be a regular expression"), ("^(.+)--", "must have a group")):
        with pytest.raises(ValidationError, match=complaint):
            GatewaySettings(conversation_patterns={"x-request-id": wrong})


@pytest.mark.parametrize(
    ("kind", "given", "complaint"),
    [
        (
            GatewaySettings,
            {"tls_certificate_file": "/c"},
            "KVLOOP_TLS_CERTIFICATE_FILE is set, so KVLOOP_TLS_KEY_FILE must",
        ),
        (GatewaySettings, {"tls_key_file": "/k"}, "KVLOOP_TLS_KEY_FILE is set, so KVLOOP_TLS_CERTIFICATE_FILE must"),
        (
            GatewaySettings,
            {"tls_client_ca_file": "/a"},
            "KVLOOP_TLS_CLIENT_CA_FILE has no effect without KVLOOP_TLS_CERTIFICATE_FILE",
        ),
        (GatewaySettings, {"prefill_key_file": "/k"}, "KVLOOP_PREFILL_CERTIFICATE_FILE must be set"),
        (EnvoySettings, {"certificate_file": "/c"}, "KVLOOP_ENVOY_KEY_FILE must be set"),
        (EnvoySettings, {"prefill_client_ca_file": "/a"}, "no effect without KVLOOP_ENVOY_PREFILL_CERTIFICATE_FILE"),
        (EnvoySettings, {"extproc_ca_file": "/a"}, "KVLOOP_ENVOY_EXTPROC_SERVER_NAME must be set"),
        (
            EnvoySettings,
            {"worker_certificate_file": "/c", "worker_key_file": "/k"},
            "no effect without KVLOOP_ENVOY_WORKER_CA_FILE",
        ),
    ],
)
def test_half_of_a_tls_configuration_stops_the_start(kind: Any, given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        kind(**given)


@pytest.mark.parametrize("kind", [GatewaySettings, EnvoySettings])
def test_nothing_listens_beyond_loopback_by_default(kind: Any) -> None:
    listens = {name: field.default for name, field in kind.model_fields.items() if "listen" in name}
    assert len(listens) >= 2
    assert {address.rpartition(":")[0] for address in listens.values()} == {"127.0.0.1"}


def test_a_rule_for_handles_hosts_that_is_none_stops_the_start() -> None:
    with pytest.raises(ValidationError, match=r"neither a host name, nor \*\.domain, nor an address or network"):
        GatewaySettings(handle_hosts=("10.0.0.0/33",))


def test_settings_do_not_change_after_the_start() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings().reuse = False  # type: ignore[misc]


def test_the_secret_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_WORKER_SECRET", "hush-hush")
    settings = GatewaySettings()
    assert settings.worker_secret is not None
    assert settings.worker_secret.get_secret_value() == "hush-hush"
    assert "hush-hush" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize("kind", [GatewaySettings, EnvoySettings])
def test_every_setting_is_documented_with_its_variable_and_default(kind: type[GatewaySettings | EnvoySettings]) -> None:
    page = as_markdown()
    for name, field in kind.model_fields.items():
        variable = f"{kind.model_config.get('env_prefix')}{name.upper()}"
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{variable}` |")]
        if isinstance(field.default, tuple):
            assert json.dumps(field.default) in row
        elif field.default is not None:
            assert str(field.default).lower() in row.lower()


def test_the_reference_is_printed_by_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(module.__file__, run_name="__main__")
    assert capsys.readouterr().out == as_markdown()
