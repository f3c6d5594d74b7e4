"""TLS between ext_proc and Envoy, both ways; certificates are read once, at start."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.settings import GatewaySettings


def server_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Return what the gRPC server needs to speak TLS, None for plaintext; with a client CA it is mutual."""
    if settings.tls_certificate_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    _load_chain(context, settings.tls_certificate_file, settings.tls_key_file, "KVLOOP_TLS")
    if settings.tls_client_ca_file is not None:
        _load_ca(context, settings.tls_client_ca_file, "KVLOOP_TLS_CLIENT_CA_FILE")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def prefill_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Return what our calls to an ``https`` prefill listener need, None for the system's own authorities."""
    if settings.prefill_ca_file is None and settings.prefill_certificate_file is None:
        return None
    context = ssl.create_default_context()
    if settings.prefill_ca_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(context, settings.prefill_ca_file, "KVLOOP_PREFILL_CA_FILE")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.prefill_certificate_file is not None:
        _load_chain(context, settings.prefill_certificate_file, settings.prefill_key_file, "KVLOOP_PREFILL")
    return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path | None, prefix: str) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use {certificate} with {key}: {_reason(error)}; check {prefix}_CERTIFICATE_FILE and {prefix}_KEY_FILE"
        ) from None


def _load_ca(context: ssl.SSLContext, ca: Path, variable: str) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use {ca}: {_reason(error)}; check {variable}") from None


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", "") or error.strerror or error)
