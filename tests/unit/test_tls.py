"""A certificate that cannot be used stops the start with one line that names the file and the setting."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from extproc.errors import ConfigError
from extproc.settings import GatewaySettings
from extproc.tls import prefill_context, server_context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    one, two = authority.issue_cert("one.example"), authority.issue_cert("two.example")
    authority.cert_pem.write_to_path(str(directory / "ca"))
    for name, cert in (("one", one), ("two", two)):
        cert.cert_chain_pems[0].write_to_path(str(directory / name))
        cert.private_key_pem.write_to_path(str(directory / f"{name}.key"))
    (directory / "text").write_text("no certificate")
    return {path.name: path for path in directory.iterdir()}


def test_plaintext_is_the_default() -> None:
    assert server_context(GatewaySettings()) is None
    assert prefill_context(GatewaySettings()) is None


def test_with_a_client_authority_the_server_asks_for_a_certificate(files: dict[str, Path]) -> None:
    own = {"tls_certificate_file": files["one"], "tls_key_file": files["one.key"]}
    one_way, mutual = (
        server_context(GatewaySettings(**own, **more)) for more in ({}, {"tls_client_ca_file": files["ca"]})
    )
    assert one_way is not None
    assert mutual is not None
    assert (one_way.verify_mode, mutual.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)
    assert mutual.minimum_version == ssl.TLSVersion.TLSv1_2


def test_the_prefill_listener_s_name_is_checked(files: dict[str, Path]) -> None:
    own = {"prefill_certificate_file": files["one"], "prefill_key_file": files["one.key"]}
    for settings in (GatewaySettings(**own), GatewaySettings(prefill_ca_file=files["ca"], **own)):
        context = prefill_context(settings)
        assert context is not None
        assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"tls_certificate_file": "one", "tls_key_file": "two.key"},
            "KVLOOP_TLS_CERTIFICATE_FILE and KVLOOP_TLS_KEY_FILE",
        ),
        ({"tls_certificate_file": "gone", "tls_key_file": "one.key"}, "No such file"),
        ({"tls_certificate_file": "text", "tls_key_file": "text"}, "check KVLOOP_TLS_CERTIFICATE_FILE"),
        (
            {"tls_certificate_file": "one", "tls_key_file": "one.key", "tls_client_ca_file": "text"},
            "check KVLOOP_TLS_CLIENT_CA_FILE",
        ),
        ({"prefill_ca_file": "gone"}, "check KVLOOP_PREFILL_CA_FILE"),
        ({"prefill_certificate_file": "one", "prefill_key_file": "gone"}, "check KVLOOP_PREFILL_CERTIFICATE_FILE"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_setting(
    files: dict[str, Path], given: dict[str, str], complaint: str
) -> None:
    settings = GatewaySettings(**{name: files.get(file, Path("/nowhere") / file) for name, file in given.items()})
    make = prefill_context if settings.tls_certificate_file is None else server_context
    with pytest.raises(ConfigError, match=complaint) as refused:
        make(settings)
    assert "\n" not in str(refused.value)
