"""Every knob, typed, with its unit and the reason for its default. Read once at start; wrong values stop the start.

Environment variables carry the ``KVLOOP_`` prefix (``KVLOOP_ENVOY_`` for the Envoy part), for example
``KVLOOP_PREFILL_TIMEOUT_SECONDS=60``. Tuples and lists are JSON: ``KVLOOP_CONVERSATION_HEADERS='["x-chat-id"]'``.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

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

Url = Annotated[str, _spelled_like(r"https?://[^/?#\s]+", "a URL without a path, like http://127.0.0.1:10001")]
RefusedPath = Annotated[str, _spelled_like(r"/[A-Za-z0-9._~/-]*", "a path that starts with a slash, like /invocations")]


def _with_a_real_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > 65_535:  # noqa: PLR2004 - ports have 16 bits
        raise ValueError("a port is at most 65535")
    return address


ListenAddress = Annotated[Address, AfterValidator(_with_a_real_port)]
"""Where this process listens. Of a larger port the system would take the last 16 bits, and listen elsewhere."""


class GatewaySettings(BaseSettings):
    """What the ext_proc service needs to know. One frozen object, handed to whoever reads a part of it."""

    model_config = SettingsConfigDict(env_prefix="KVLOOP_", frozen=True, extra="ignore")

    # --- where it listens and whom it calls -----------------------------------------------------------------
    listen: ListenAddress = Field("127.0.0.1:50051", description="gRPC address Envoy's ext_proc filter connects to.")
    admin_listen: ListenAddress = Field(
        "127.0.0.1:9464", description="HTTP address of /metrics, /healthz and /debug/state."
    )
    prefill_url: Url = Field(
        "http://127.0.0.1:10001",
        description="Base URL of Envoy's prefill listener, which balances the prefill legs over the P pool.",
    )
    worker_secret: SecretStr | None = Field(
        None,
        description="Shared secret sent to workers on both legs; the worker guard refuses kv_transfer_params without it.",
    )
    worker_api_key: SecretStr | None = Field(
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
    event_max_bytes: PositiveInt = Field(8 * Mebibyte, description="The same for one server-sent event.")
    handle_max_bytes: PositiveInt = Field(
        2 * Mebibyte, description="Larger handles are stripped but not kept. 131k tokens make about 64 KiB."
    )

    # --- patience -----------------------------------------------------------------------------------------------
    render_timeout_seconds: PositiveFloat = Field(5.0, description="Then the turn goes cold.")
    reuse_timeout_seconds: PositiveFloat = Field(
        30.0, description="Prefill leg with a handle; then one cold retry. Covers a P that parks the request."
    )
    prefill_timeout_seconds: PositiveFloat = Field(
        120.0, description="Cold prefill leg; then D prefills by itself. The longest prompt's prefill must fit."
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
    def _margin_fits(self) -> GatewaySettings:
        if self.handle_margin_seconds >= self.handle_ttl_seconds:
            msg = (
                f"handle_margin_seconds ({self.handle_margin_seconds}) must be below handle_ttl_seconds"
                f" ({self.handle_ttl_seconds}), or no handle would ever be used"
            )
            raise ValueError(msg)
        if self.reuse_timeout_seconds > self.handle_margin_seconds:
            msg = (
                f"reuse_timeout_seconds ({self.reuse_timeout_seconds}) must not be above handle_margin_seconds"
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
    listen: Address = Field("127.0.0.1:10000", description="Where clients connect (gateway topology).")
    intercept_prefill: tuple[Address, ...] = Field(
        ("127.0.0.1:10002",),
        min_length=1,
        description="Where the orchestrator finds P: one address for the whole pool, or one per worker, in their order.",
    )
    intercept_decode: tuple[Address, ...] = Field(
        ("127.0.0.1:10003",), min_length=1, description="Where the orchestrator finds D, in the same way."
    )
    prefill_listen: Address = Field("127.0.0.1:10001", description="Where ext_proc sends its legs. Keep it private.")
    admin_listen: Address = Field("127.0.0.1:9901", description="Envoy's admin interface. Keep it private.")
    extproc: tuple[Address, ...] = Field(("127.0.0.1:50051",), min_length=1, description="ext_proc replicas.")
    prefill: tuple[Address, ...] = Field(("127.0.0.1:8100",), min_length=1, description="Prefill workers (P).")
    decode: tuple[Address, ...] = Field(("127.0.0.1:8200",), min_length=1, description="Decode workers (D).")
    hash_balance_factor: int = Field(
        150,
        ge=100,
        description="A D takes at most this percentage of the mean load before its conversations spill over.",
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
    max_client_connections: PositiveInt = Field(
        10_000, description="Connections beyond it are closed at once. The prefill listener does not count."
    )
    access_log: str = Field("/dev/stdout", description="File of the JSON access log.")
    otlp: Address | None = Field(
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


_OTHERS_VARIABLES: Final = re.compile(
    r"KVLOOP_(PLUGIN_.*|CACHE|SERVICE_.*|PORT(_.*)?|[A-Z0-9_]*_SERVICE_(HOST|PORT.*)|.*_(TCP|UDP)(_.*)?)"
)
"""The workers' variables, and those Kubernetes makes up for services whose names start with kvloop."""


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a line for each variable that looks like a setting and is none: a typing error would go unnoticed."""
    known = [
        f"{settings.model_config.get('env_prefix', '')}{name.upper()}"
        for settings in (GatewaySettings, EnvoySettings)
        for name in settings.model_fields
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
