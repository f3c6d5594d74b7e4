"""TLS in the rendered Envoy configuration: who shows which certificate to whom, and whom Envoy believes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as Packed

if TYPE_CHECKING:
    from pathlib import Path

_SOCKET: Final = "envoy.transport_sockets.tls"
_PARAMETERS: Final = tls.TlsParameters(tls_minimum_protocol_version=tls.TlsParametersTlsProtocol.TLSv1_2)


def server_socket(certificate: Path | None, key: Path | None, client_ca: Path | None) -> core.TransportSocket | None:
    """Serve TLS with this certificate, None for plaintext; with ``client_ca`` clients must show one signed by it."""
    if certificate is None:
        return None
    context = tls.DownstreamTlsContext(
        common_tls_context=tls.CommonTlsContext(
            tls_params=_PARAMETERS,
            tls_certificates=[_certificate(certificate, key)],
            validation_context=_trusting(client_ca, None),
            alpn_protocols=["h2", "http/1.1"],
        ),
        require_client_certificate=client_ca is not None,
    )
    return core.TransportSocket(name=_SOCKET, typed_config=Packed.pack(context))


def client_socket(
    ca: Path | None, certificate: Path | None, key: Path | None, server_name: str | None, *, alpn: str
) -> core.TransportSocket | None:
    """Call with TLS, None for plaintext. The peer must be signed by ``ca`` and carry ``server_name``."""
    if ca is None:
        return None
    context = tls.UpstreamTlsContext(
        common_tls_context=tls.CommonTlsContext(
            tls_params=_PARAMETERS,
            tls_certificates=[] if certificate is None else [_certificate(certificate, key)],
            validation_context=_trusting(ca, server_name),
            alpn_protocols=[alpn],
        ),
        sni=server_name or "",
    )
    return core.TransportSocket(name=_SOCKET, typed_config=Packed.pack(context))


def _certificate(certificate: Path, key: Path | None) -> tls.TlsCertificate:
    return tls.TlsCertificate(
        certificate_chain=core.DataSource(filename=str(certificate)), private_key=core.DataSource(filename=str(key))
    )


def _trusting(ca: Path | None, server_name: str | None) -> tls.CertificateValidationContext | None:
    if ca is None:
        return None
    # An authority alone says that somebody is known, not that it is the one we called.
    names = [] if server_name is None else [matcher.StringMatcher(exact=server_name)]
    return tls.CertificateValidationContext(
        trusted_ca=core.DataSource(filename=str(ca)),
        match_typed_subject_alt_names=[
            tls.SubjectAltNameMatcher(san_type=tls.SubjectAltNameMatcherSanType.DNS, matcher=name) for name in names
        ],
    )
