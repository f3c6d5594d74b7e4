"""Every knob, typed, with its unit and the reason for its default. Read once at start; wrong values stop the start.

Environment variables carry the ``KVLOOP_`` prefix (``KVLOOP_ENVOY_`` for the Envoy part), for example
``KVLOOP_PREFILL_TIMEOUT_SECONDS=60``. Tuples and lists are JSON: ``KVLOOP_CONVERSATION_HEADERS='["x-chat-id"]'``.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from extproc.handle_hosts import host_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

Mebibyte = 1024 * 1024


def _spelled_like(pattern: str, words: str) -> AfterValidator:
    """Ask for a spelling, and say it in words where it is not kept."""
    accepted = re.compile(pattern)

    def check(value: str) -> str:
        if accepted.fullmatch(value) is None:
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


Address = Annotated[
    str,
    _spelled_like(
        r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", "host:port (an IPv6 host in brackets), like 127.0.0.1:50051"
    ),
]
"""``host:port``; an IPv6 host stands in brackets."""


def _with_a_conversation(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if "conversation" not in groups:
        raise ValueError("must have a group (?P<conversation>...)")
    return pattern


ConversationPattern = Annotated[str, AfterValidator(_with_a_conversation)]


def _fit_for_a_header(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value().isprintable():
        raise ValueError("must be one line of printable characters: a file's last line end does not belong to it")
    return secret


HeaderSecret = Annotated[SecretStr, AfterValidator(_fit_for_a_header)]
"""A secret that is sent as a header."""

Url = Annotated[str, _spelled_like(r"https?://[^/?#@\s]+", "a URL without a path, like http://127.0.0.1:10001")]
RefusedPath = Annotated[str, _spelled_like(r"/[A-Za-z0-9._~/-]*", "a path that starts with a slash, like /invocations")]


def _with_a_real_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > 65_535:  # noqa: PLR2004 - ports have 16 bits
        raise ValueError("a port is at most 65535")
    return address


ListenAddress = Annotated[Address, AfterValidator(_with_a_real_port)]
"""Where this process listens. Of a larger port the system would take the last 16 bits, and listen elsewhere."""


def _with_a_known_port(address: str) -> str:
    if not 0 < int(address.rpartition(":")[2]) <= 65_535:  # noqa: PLR2004 - ports have 16 bits
        raise ValueError("a port is 1 to 65535")
    return address


EnvoyAddress = Annotated[Address, AfterValidator(_with_a_known_port)]
"""Where Envoy listens or connects: others have to know it, so port 0 (any free one) is none."""


def _readable_host_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    host_rules(rules)
    return rules


def _variable(settings: BaseSettings | type[BaseSettings], name: str) -> str:
    """Return the environment variable that sets a field."""
    return f"{settings.model_config.get('env_prefix', '')}{name}".upper()


def _check_together(settings: BaseSettings, *names: str, needs: str = "") -> None:
    """Raise ``ValueError`` unless all of these settings are set or none is, and then ``needs`` is set, too."""
    given = [name for name in names if getattr(settings, name) is not None]
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        msg = f"{_variable(settings, given[0])} is set, so {_variable(settings, missing)} must be set, too"
        raise ValueError(msg)
    if given and needs and getattr(settings, needs) is None:
        msg = f"{_variable(settings, given[0])} has no effect without {_variable(settings, needs)}"
        raise ValueError(msg)


class GatewaySettings(BaseSettings):
    """What the ext_proc service needs to know. One frozen object, handed to whoever reads a part of it."""

    model_config = SettingsConfigDict(env_prefix="KVLOOP_", frozen=True, extra="ignore")

    # --- where it listens and whom it calls -----------------------------------------------------------------
    listen: ListenAddress = Field("127.0.0.1:50051", description="gRPC address Envoy's ext_proc filter connects to.")
    tls_certificate_file: Path | None = Field(
        None, description="Certificate (chain) of the gRPC server, PEM. Unset: plaintext, for Envoy on this machine."
    )
    tls_key_file: Path | None = Field(None, description="Its private key.")
    tls_client_ca_file: Path | None = Field(
        None,
        description="Authority of Envoy's client certificate; others are refused then. Files are read at start only.",
    )
    admin_listen: ListenAddress = Field(
        "127.0.0.1:9464", description="HTTP address of /metrics, /healthz, /readyz and /debug/state."
    )
    prefill_url: Url = Field(
        "http://127.0.0.1:10001",
        description="Base URL of Envoy's prefill listener, which balances the prefill legs over the P pool.",
    )
    prefill_ca_file: Path | None = Field(
        None,
        description="Authority of the prefill listener's certificate, where its URL is https; unset: the system's.",
    )
    prefill_certificate_file: Path | None = Field(None, description="Our client certificate for it.")
    prefill_key_file: Path | None = Field(None, description="Its private key.")
    worker_secret: HeaderSecret | None = Field(
        None,
        description="Shared secret sent to workers on both legs; the worker guard refuses kv_transfer_params without it.",
    )
    worker_api_key: HeaderSecret | None = Field(
        None, description="Key the gateway's own requests (releases) carry, for workers that run with --api-key."
    )

    # --- whose turn is this ---------------------------------------------------------------------------------
    conversation_headers: tuple[str, ...] = Field(
        ("x-conversation-id", "x-session-id"),
        description="Request headers that may carry the conversation id, first present wins.",
    )
    conversation_patterns: dict[str, ConversationPattern] = Field(
        {},
        description="For callers that put the conversation id inside another header: header name to regular expression,"
        ' whose group `conversation` is the id, like `{"x-request-id": "^(?P<conversation>.+)--"}`. Looked at when none of'
        " the headers above is there.",
    )
    conversation_fields: tuple[str, ...] = Field(
        ("conversation_id", "session_id", "prompt_cache_key"),
        description="Top-level body fields looked at when no header carries one, first present wins.",
    )
    conversation_id_max_bytes: PositiveInt = Field(
        256, description="Longer ids are ignored and the turn goes cold: ids are names, not payloads."
    )
    tenant_header: str = Field(
        "authorization", description="Header whose hash separates tenants; absent means the anonymous tenant."
    )

    # --- reuse ----------------------------------------------------------------------------------------------
    reuse: bool = Field(
        default=True, description="False keeps every turn cold, to compare or to switch off in an emergency."
    )
    prefill_bidirectional: bool = Field(
        default=True,
        description="Whether the P pool runs with bidirectional_kv_xfer. A P without it may park a request for ever.",
    )
    sequence_source: Literal["auto", "digest", "token_ids"] = Field(
        "auto",
        description="Where the proof's tokens come from: the plugin's digest in D's handles, token ids streamed by a"
        " stock D, or whichever the pool is seen to offer.",
    )
    handle_ttl_seconds: PositiveFloat = Field(
        480.0, description="The workers' decoder_kv_blocks_ttl (vLLM's default is 480)."
    )
    handle_margin_seconds: PositiveFloat = Field(
        30.0, description="A handle is dropped this long before D may free it, to cover the prefill leg's own queueing."
    )
    min_reuse_tokens: PositiveInt = Field(
        64,
        description="Fewer proven tokens are not worth a read; vLLM's kv_recompute_threshold, below which P skips it.",
    )
    decode_block_size_tokens: PositiveInt | None = Field(
        None, description="D's KV block size, to check and cut handles. Unset: from the plugin or D's /metrics."
    )
    single_host: bool = Field(
        default=False, description="Accept loopback addresses in handles. Only right when P and D share one machine."
    )
    handle_hosts: Annotated[tuple[str, ...], AfterValidator(_readable_host_rules)] = Field(
        (),
        description="Hosts a handle may name, since P connects to them: names, *.domains, addresses, networks in CIDR."
        " Others' handles are stripped and not kept. Empty: any but link-local and multicast addresses.",
    )

    # --- under somebody else's P/D orchestrator (roles prefill and decode) -----------------------------------
    handle_owner: Literal["kvloop", "orchestrator"] = Field(
        "kvloop",
        description="Who carries handles from turn to turn. `orchestrator`: it keeps D's handles itself and attaches them"
        " to its prefill legs; kvloop then lets them pass once they are proven, and needs no conversation id.",
    )
    prefill_header: str | None = Field(
        None,
        description="A request header whose presence marks prefill legs, for orchestrators that send them without"
        " `do_remote_decode`.",
    )

    # --- memory -------------------------------------------------------------------------------------------------
    store_max_conversations: PositiveInt = Field(100_000, description="Beyond it the oldest handle is released.")
    store_max_bytes: PositiveInt = Field(512 * Mebibyte, description="The same bound in bytes.")

    # --- a store that several processes share --------------------------------------------------------------------
    store_url: SecretStr | None = Field(
        None,
        description="Redis 6.2 or newer, or Valkey, that all replicas share: `redis://host:6379/0`, `rediss://` with TLS,"
        " or `unix:///path`. Unset: each process keeps its own handles in memory. See docs/scaling-out.md.",
    )
    store_password: SecretStr | None = Field(None, description="The store's password; the URL may name the user.")
    store_ca_file: str | None = Field(None, description="CA of the store's certificate; unset: the system's CAs.")
    store_timeout_seconds: PositiveFloat = Field(
        0.1, description="The longest a turn waits for the store; then it goes cold, or its handle is not kept."
    )

    # --- how much decode workers retain ---------------------------------------------------------------------------
    retain_max_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Part of a D's KV memory that kept turns may pin; beyond it the least valuable are released.",
    )
    retain_max_tokens: PositiveInt | None = Field(
        None, description="The same bound in tokens per D. Unset: the share of what D's /metrics says it has."
    )
    retain_pressure: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Above this part of a D's KV memory in use, kept turns give way until it is free again.",
    )
    retain_refresh_seconds: PositiveFloat = Field(
        1.0, description="Between looks at the /metrics of each D that retains something."
    )

    return_mode: Literal["lazy", "eager", "adaptive"] = Field(
        "lazy",
        description="When P reads a turn's KV back from D: at the next turn, right after this one, or as it pays. The last two"
        " need prefix caching on P and affinity (KVLOOP_ENVOY_PREFILL_AFFINITY), and ask D for token ids.",
    )
    return_priority: int | None = Field(
        None,
        description="vLLM priority of early returns. Set it only if P schedules by priority; the lowest goes first.",
    )
    return_max_leased_tokens: PositiveInt = Field(
        100_000,
        description="P holds what it has read back early for the 30 s of its lease; at most so many tokens at a time.",
    )

    # --- letting go ---------------------------------------------------------------------------------------------
    releases_per_second: PositiveFloat = Field(
        100.0, description="Each release is a one-token request to P and holds one of its blocks for its 30 s lease."
    )

    # --- limits -------------------------------------------------------------------------------------------------
    request_max_bytes: PositiveInt = Field(
        32 * Mebibyte, description="Larger bodies get 413. 131k tokens are about 1 MiB."
    )
    response_max_bytes: PositiveInt = Field(
        64 * Mebibyte, description="A non-streamed answer is held to strip it; beyond this it is cut off as an error."
    )
    max_requests: PositiveInt = Field(
        10_000, description="Requests served at once, streaming answers included; more get 503 with retry-after."
    )
    max_preparing_requests: PositiveInt = Field(
        1_000,
        description="Those of them that D has not got yet: arriving, rendered, prefilled. Above what P can prefill within"
        " its time limit a queue only turns into timeouts.",
    )
    request_max_total_bytes: PositiveInt = Field(
        2048 * Mebibyte, description="Bodies of all requests being served; what exceeds it gets 503 with retry-after."
    )
    event_max_bytes: PositiveInt = Field(8 * Mebibyte, description="The same for one server-sent event.")
    handle_max_bytes: PositiveInt = Field(
        2 * Mebibyte,
        description="Larger handles are stripped but not kept. 131k tokens make about 125 KiB, digests included.",
    )

    # --- patience -----------------------------------------------------------------------------------------------
    render_timeout_seconds: PositiveFloat = Field(5.0, description="Then the turn goes cold.")
    reuse_timeout_seconds: PositiveFloat = Field(
        30.0, description="Prefill leg with a handle; then one cold retry. Covers a P that parks the request."
    )
    prefill_timeout_seconds: PositiveFloat = Field(
        120.0, description="Cold prefill leg; then D prefills by itself. The longest prompt's prefill must fit."
    )
    preparation_timeout_seconds: PositiveFloat = Field(
        150.0,
        description="Everything of ours together, from a request's last byte until D gets it; legs that do not fit in are"
        " given up or left out.",
    )
    drain_delay_seconds: NonNegativeFloat = Field(
        3.0,
        description="After SIGTERM health says NOT_SERVING, but requests are still taken for this long, so that Envoy's"
        " health checks notice before anything is refused.",
    )
    drain_seconds: PositiveFloat = Field(
        600.0, description="After SIGTERM running streams may take this long; keep it above the longest answer."
    )

    # --- what it tells ----------------------------------------------------------------------------------------
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    turn_log_level: Literal["debug", "info"] = Field(
        "debug",
        description="Level of the one line per turn. Envoy's access log tells the same, so by default it is not said twice.",
    )
    debug_state: Literal["loopback", "anyone", "off"] = Field(
        "loopback",
        description="Whom /debug/state, which `kvloop top` shows, answers: conversations as hashes, addresses of engines.",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> GatewaySettings:
        _check_together(self, "tls_certificate_file", "tls_key_file")
        _check_together(self, "tls_client_ca_file", needs="tls_certificate_file")
        _check_together(self, "prefill_certificate_file", "prefill_key_file")
        return self

    @model_validator(mode="after")
    def _margin_fits(self) -> GatewaySettings:
        if self.handle_margin_seconds >= self.handle_ttl_seconds:
            msg = (
                f"KVLOOP_HANDLE_MARGIN_SECONDS ({self.handle_margin_seconds}) must be below KVLOOP_HANDLE_TTL_SECONDS"
                f" ({self.handle_ttl_seconds}), or no handle would ever be used"
            )
            raise ValueError(msg)
        if self.reuse_timeout_seconds > self.handle_margin_seconds:
            msg = (
                f"KVLOOP_REUSE_TIMEOUT_SECONDS ({self.reuse_timeout_seconds}) must not be above KVLOOP_HANDLE_MARGIN_SECONDS"
                f" ({self.handle_margin_seconds}), or P could still read when D has let go"
            )
            raise ValueError(msg)
        return self


class EnvoySettings(BaseSettings):
    """What `kvloop envoy render` builds an Envoy bootstrap from."""

    model_config = SettingsConfigDict(env_prefix="KVLOOP_ENVOY_", frozen=True, extra="ignore")

    topology: Literal["gateway", "intercept"] = Field(
        "gateway",
        description="`gateway`: clients connect to Envoy, kvloop takes requests to P and D. `intercept`: a P/D orchestrator"
        " of yours does, and reaches its workers through Envoy, where kvloop adds the way back (docs/intercept.md).",
    )
    listen: EnvoyAddress = Field("127.0.0.1:10000", description="Where clients connect (gateway topology).")
    intercept_prefill: tuple[EnvoyAddress, ...] = Field(
        ("127.0.0.1:10002",),
        min_length=1,
        description="Where the orchestrator finds P: one address for the whole pool, or one per worker, in their order.",
    )
    intercept_decode: tuple[EnvoyAddress, ...] = Field(
        ("127.0.0.1:10003",), min_length=1, description="Where the orchestrator finds D, in the same way."
    )
    prefill_listen: EnvoyAddress = Field(
        "127.0.0.1:10001", description="Where ext_proc sends its legs. Keep it private."
    )
    admin_listen: EnvoyAddress = Field("127.0.0.1:9901", description="Envoy's admin interface. Keep it private.")
    extproc: tuple[EnvoyAddress, ...] = Field(("127.0.0.1:50051",), min_length=1, description="ext_proc replicas.")
    prefill: tuple[EnvoyAddress, ...] = Field(("127.0.0.1:8100",), min_length=1, description="Prefill workers (P).")
    decode: tuple[EnvoyAddress, ...] = Field(("127.0.0.1:8200",), min_length=1, description="Decode workers (D).")
    hash_balance_factor: int = Field(
        150,
        ge=100,
        description="A D takes at most this percentage of the mean load before its conversations spill over.",
    )
    prefill_affinity: bool = Field(
        default=True,
        description="Send a conversation's prefill legs to the same P, whose prefix cache then has what it needs.",
    )
    prefill_hash_balance_factor: int = Field(
        125, ge=100, description="hash_balance_factor for P: above it a leg goes to another P than the conversation's."
    )
    stream_idle_timeout_seconds: PositiveFloat = Field(
        300.0, description="The only guard against a processor that goes silent while it holds a request."
    )
    health_interval_seconds: PositiveFloat = Field(5.0, description="Between active health checks of workers.")
    health_timeout_seconds: PositiveFloat = Field(
        5.0, description="Patience of one health check: a busy worker answers late, and late is not dead."
    )
    worker_idle_timeout_seconds: PositiveFloat = Field(
        4.0,
        description="Unused connections to workers are closed after this long. Keep it below their keep-alive"
        " (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s by default): a request on a connection the worker is closing is lost,"
        " since nothing is retried.",
    )
    refused_paths: tuple[RefusedPath, ...] = Field(
        ("/invocations", "/inference/v1/generate", "/inference/v1/abort_requests", "/abort_requests"),
        description="Answered 404 on the client listener: vLLM paths that take kv_transfer_params unseen by ext_proc,"
        " or end other clients' requests (--enable-scale-out opens most of them).",
    )
    certificate_file: Path | None = Field(
        None, description="Certificate (chain) of the client listener, PEM. Unset: plaintext."
    )
    key_file: Path | None = Field(None, description="Its private key.")
    prefill_certificate_file: Path | None = Field(None, description="Certificate of the prefill listener.")
    prefill_key_file: Path | None = Field(None, description="Its private key.")
    prefill_client_ca_file: Path | None = Field(
        None, description="Authority of ext_proc's client certificate there; others are refused then."
    )
    extproc_ca_file: Path | None = Field(
        None, description="Authority of ext_proc's certificate. Unset: plaintext, for ext_proc on this machine."
    )
    extproc_server_name: str | None = Field(None, description="The name that certificate must carry.")
    extproc_certificate_file: Path | None = Field(None, description="Envoy's client certificate for ext_proc.")
    extproc_key_file: Path | None = Field(None, description="Its private key.")
    worker_ca_file: Path | None = Field(None, description="Authority of the workers' certificates. Unset: plaintext.")
    worker_server_name: str | None = Field(None, description="The name those certificates must carry.")
    worker_certificate_file: Path | None = Field(None, description="Envoy's client certificate for the workers.")
    worker_key_file: Path | None = Field(None, description="Its private key.")
    max_prefill_requests: PositiveInt = Field(
        10_000, description="Legs under way at the P pool; Envoy answers more with 503 at once, and D serves alone."
    )
    max_decode_requests: PositiveInt = Field(
        10_000, description="Requests under way at the D pool; clients get 503 with retry-after for more."
    )
    max_header_kilobytes: int = Field(
        60, ge=1, le=8192, description="All headers of one request together; more get 431, as do more than 100 headers."
    )
    upload_timeout_seconds: PositiveFloat = Field(
        300.0, description="A request whose body has not arrived by then gets 408, however steadily it trickles in."
    )
    max_heap_bytes: PositiveInt = Field(
        2048 * Mebibyte, description="Envoy's memory; from 95% of it on new requests get 503 with retry-after."
    )
    max_client_connections: PositiveInt = Field(
        10_000, description="Connections beyond it are closed at once. The prefill listener does not count."
    )
    access_log: str = Field("/dev/stdout", description="File of the JSON access log.")
    otlp: EnvoyAddress | None = Field(
        None,
        description="OTLP/gRPC collector of Envoy's own spans, for example `127.0.0.1:4317`. Unset: none are made.",
    )
    otlp_sample_percent: float = Field(
        100.0,
        ge=0,
        le=100,
        description="Share of the requests Envoy makes spans for; those of traced clients count as well.",
    )
    concurrency: PositiveInt | None = Field(None, description="Envoy worker threads; unset means one per core.")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> EnvoySettings:
        _check_together(self, "certificate_file", "key_file")
        _check_together(self, "prefill_certificate_file", "prefill_key_file")
        _check_together(self, "prefill_client_ca_file", needs="prefill_certificate_file")
        for peer in ("extproc", "worker"):
            _check_together(self, f"{peer}_ca_file", f"{peer}_server_name")
            _check_together(self, f"{peer}_certificate_file", f"{peer}_key_file", needs=f"{peer}_ca_file")
        return self


_OTHERS_VARIABLES: Final = re.compile(
    r"KVLOOP_(PLUGIN_.*|CACHE|SERVICE_.*|PORT(_.*)?|[A-Z0-9_]*_SERVICE_(HOST|PORT.*)|.*_(TCP|UDP)(_.*)?)"
)
"""The workers' variables, and those Kubernetes makes up for services whose names start with kvloop."""


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a line for each variable that looks like a setting and is none: a typing error would go unnoticed."""
    known = [
        _variable(settings, name) for settings in (GatewaySettings, EnvoySettings) for name in settings.model_fields
    ]
    lines = []
    for name in sorted(environment):
        variable = name.upper()
        if variable.startswith("KVLOOP_") and variable not in known and not _OTHERS_VARIABLES.fullmatch(variable):
            close = difflib.get_close_matches(variable, known, n=1)
            lines.append(f"{name} is no setting and has no effect" + (f"; did you mean {close[0]}?" if close else ""))
    return lines


def problems(error: ValidationError) -> list[str]:
    """Return a line for each wrong setting, with the variable that sets it."""
    settings = EnvoySettings if error.title == EnvoySettings.__name__ else GatewaySettings
    prefix = settings.model_config.get("env_prefix", "")
    return [
        "".join(f"{prefix}{part}: ".upper() for part in problem["loc"][:1])
        + problem["msg"].removeprefix("Value error, ")
        for problem in error.errors()
    ]


def not_json(error: SettingsError) -> str:
    """Return the line for a list or table that is no JSON; pydantic names its field in the message alone."""
    _, _, rest = str(error).partition('field "')
    name = rest.partition('"')[0]
    settings = GatewaySettings if name in GatewaySettings.model_fields else EnvoySettings
    kind, example = ("table", '{"a":"b"}') if name == "conversation_patterns" else ("list", '["a","b"]')
    return f"{_variable(settings, name)}: a {kind} is spelled as JSON, like {example}"


_MARKDOWN_HEAD = """# Settings

All settings are environment variables, read once at start; a wrong value stops the start with one line that names it.
Lists are JSON. Made by `python -m extproc.settings > docs/settings.md`; a test keeps it current.
"""


def as_markdown() -> str:
    """Return the reference of all settings, as docs/settings.md holds it."""
    parts = [_MARKDOWN_HEAD]
    for title, settings in (
        ("The gateway (`kvloop serve`)", GatewaySettings),
        ("Envoy (`kvloop envoy`)", EnvoySettings),
    ):
        parts.append(f"\n## {title}\n\n| variable | default | meaning |\n|---|---|---|\n")
        prefix = settings.model_config.get("env_prefix", "")
        for name, field in settings.model_fields.items():
            default = "unset" if field.default is None else f"`{_spelled(field.default)}`"
            parts.append(f"| `{prefix}{name.upper()}` | {default} | {field.description or ''} |\n")
    return "".join(parts)


def _spelled(value: object) -> str:
    """Spell a default as its variable would."""
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201 - made to be redirected into the docs
