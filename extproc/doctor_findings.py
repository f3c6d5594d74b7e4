"""What a deployment's facts mean: each finding says what is so, and what to do about it. Pure; ``doctor`` gathers the facts.

What cannot be seen from outside is said to be so (``unseen``), never called right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS_HANDLES: Final = (0, 33)
"""The first vLLM that puts handles into streams by itself."""

VLLM_TTL_SECONDS: Final = 480
TESTED_ENVOY: Final = (1, 40)
_EXT_PROC: Final = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_PER_ROUTE: Final = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
_HTTP_OK: Final = 200


class Status(StrEnum):
    """How bad it is. ``fault``: no reuse, or not safe; ``warning``: works, worse than it could."""

    OK = "ok"
    UNSEEN = "unseen"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``fix`` is empty where nothing is to be done."""

    status: Status
    part: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Envoy:
    """Envoy's answers: version (None: it did not answer) and configuration dump."""

    version: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's answers. ``render_status`` is HTTP's, 0 for none; ``kv_config`` only the guard or vLLM's developer mode shows."""

    role: str
    address: str
    version: str | None = None
    block_size_tokens: int | None = None
    render_status: int = 0
    kv_config: dict[str, Any] | None = None
    refuses_secret: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """The shared store: ``error`` is what kept it from use; ``takes_once`` whether a second GETDEL found nothing."""

    error: str = ""
    version: str = ""
    eviction: str = ""
    takes_once: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Two turns through the gateway.

    HTTP statuses (0: no answer), receipts, and what was counted meanwhile: handles' fates, and why some were released.
    """

    statuses: tuple[int, ...]
    receipts: tuple[dict[str, str], ...]
    fates: frozenset[str] = frozenset()
    releases: frozenset[str] = frozenset()
    url: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found out. ``store`` and ``probe`` are None where there is none or none was asked for."""

    envoy: Envoy
    extproc_metrics: dict[str, float] | None
    workers: tuple[Worker, ...]
    store: Store | None = None
    probe: Probe | None = None
    extproc_obstacle: str = ""
    extproc_shares_store: bool = False
    handle_ttl_seconds: float = 480.0
    single_host: bool = False
    reuse: bool = True
    bidirectional: bool = True


def examine(facts: Facts) -> list[Finding]:
    """Return the findings, part by part."""
    return [
        *_envoy(facts.envoy),
        *_extproc(facts),
        *(finding for worker in facts.workers for finding in _worker(worker, facts)),
        # Whoever cannot ask Envoy knows no workers; that is no word about them.
        *(_pool(facts.workers) if facts.envoy.version is not None else ()),
        *_store(facts.store, extproc_shares=facts.extproc_shares_store),
        *_probe(facts),
    ]


def worst(findings: list[Finding]) -> Status:
    """Return the worst status; what cannot be seen is no fault."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


# --- Envoy --------------------------------------------------------------------------------------------------------------


def _envoy(envoy: Envoy) -> Iterator[Finding]:
    part = "Envoy"
    if envoy.version is None:
        yield Finding(Status.FAULT, part, "its admin port does not answer", "start Envoy, or name it: --envoy-admin")
        return
    if _version(envoy.version) < TESTED_ENVOY:
        yield Finding(Status.WARNING, part, f"version {envoy.version}", "kvloop is tested with 1.40: upgrade Envoy")
    else:
        yield Finding(Status.OK, part, f"version {envoy.version}")
    filters = list(_objects(envoy.config, _EXT_PROC))
    modes = [
        mode
        for route in _objects(envoy.config, _PER_ROUTE)
        if (mode := route.get("overrides", {}).get("processing_mode"))
    ]
    if not filters or not modes:
        yield Finding(
            Status.FAULT, part, "no route goes through ext_proc", "use the configuration `kvloop envoy render` prints"
        )
        return
    faults = list(_filter_faults(filters, modes, envoy.config))
    yield from faults or [Finding(Status.OK, part, "the ext_proc filter and its routes are as they must be")]


def _filter_faults(filters: list[Any], modes: list[Any], config: dict[str, Any]) -> Iterator[Finding]:
    part = "Envoy"
    if any(found.get("failure_mode_allow") for found in filters):
        yield Finding(
            Status.FAULT,
            part,
            "ext_proc may be passed by when it fails, and clients' kv_transfer_params with it",
            "set failure_mode_allow: false",
        )
    if not all(found.get("allow_mode_override") for found in filters):
        yield Finding(
            Status.WARNING,
            part,
            "answers without a handle cannot leave ext_proc early: a message per token",
            "set allow_mode_override: true",
        )
    if any(mode.get("request_body_mode") != "FULL_DUPLEX_STREAMED" for mode in modes):
        yield Finding(
            Status.FAULT,
            part,
            "request bodies do not come to ext_proc as it needs them",
            "set request_body_mode: FULL_DUPLEX_STREAMED in the routes' overrides",
        )
    if any(mode.get("response_body_mode") != "STREAMED" for mode in modes):
        yield Finding(
            Status.FAULT,
            part,
            "answers do not come to ext_proc as they stream",
            "set response_body_mode: STREAMED in the routes' overrides",
        )
    if any(_retries(config)):
        yield Finding(
            Status.FAULT,
            part,
            "requests are retried: a replayed request would use a handle twice",
            "remove retry_policy from the routes to workers",
        )


def _retries(value: Any) -> Iterator[bool]:
    """Find retry policies of routes (ext_proc's own gRPC call may be retried)."""
    if isinstance(value, dict):
        route = value.get("route")
        yield isinstance(route, dict) and "retry_policy" in route
        for inner in value.values():
            yield from _retries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _retries(inner)


def _objects(value: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Find the configuration objects of a type, wherever they stand."""
    if isinstance(value, dict):
        if str(value.get("@type", "")).endswith(kind):
            yield value
        for inner in value.values():
            yield from _objects(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner, kind)


# --- ext_proc and the workers -------------------------------------------------------------------------------------------


def _extproc(facts: Facts) -> Iterator[Finding]:
    part = "ext_proc"
    metrics = facts.extproc_metrics
    if metrics is None:
        yield Finding(
            Status.FAULT,
            part,
            "its admin port does not answer",
            "start `kvloop serve`, or set KVLOOP_ADMIN_LISTEN as it has it",
        )
        return
    if facts.extproc_obstacle:
        fix = "start Envoy, or point KVLOOP_PREFILL_URL at its prefill listener; a draining ext_proc ends by itself"
        yield Finding(Status.FAULT, part, f"is not ready: {facts.extproc_obstacle}", fix)
    else:
        yield Finding(Status.OK, part, "serves")
    if metrics.get("kvloop_prompt_ids_differed"):
        yield Finding(
            Status.FAULT,
            part,
            "a P prefilled other tokens than it was told: reuse is off",
            "check P's vLLM; then restart",
        )
    if metrics.get("kvloop_store_up") == 0:
        yield Finding(Status.FAULT, part, "it does not get at the shared store", "see its log: store_unavailable")
    if not facts.reuse:
        yield Finding(Status.FAULT, part, "reuse is switched off", "unset KVLOOP_REUSE")
    if not facts.bidirectional:
        yield Finding(
            Status.FAULT,
            part,
            "it takes the P pool for one without bidirectional_kv_xfer",
            "run P with it (`kvloop worker prefill` does), and unset KVLOOP_PREFILL_BIDIRECTIONAL",
        )


def _worker(worker: Worker, facts: Facts) -> Iterator[Finding]:
    part = f"{worker.role} {worker.address}"
    if worker.version is None:
        yield Finding(Status.FAULT, part, "does not answer", "start it, or take it out of Envoy's configuration")
        return
    yield Finding(Status.OK, part, f"vLLM {worker.version}")
    if worker.role == "prefill":
        yield from _render(part, worker.render_status)
    if worker.block_size_tokens is None:
        yield Finding(
            Status.WARNING, part, "its /metrics does not tell a KV block size", "set KVLOOP_DECODE_BLOCK_SIZE_TOKENS"
        )
    yield from _kv_config(part, worker, facts)


def _render(part: str, status: int) -> Iterator[Finding]:
    if status == _HTTP_OK:
        yield Finding(Status.OK, part, "renders prompts")
    else:
        yield Finding(
            Status.FAULT,
            part,
            f"does not render prompts (HTTP {status}): nothing can be proven of chats",
            "start it with --enable-scale-out",
        )


def _kv_config(part: str, worker: Worker, facts: Facts) -> Iterator[Finding]:
    config = worker.kv_config
    if worker.refuses_secret:
        yield Finding(
            Status.FAULT,
            part,
            "its guard knows another secret: it refuses every prefill leg",
            _SECRET_FIX,
        )
        return
    if config is None:
        yield Finding(
            Status.UNSEEN,
            part,
            "bidirectional_kv_xfer, failure policy and TTL cannot be seen from here",
            "kvloop's guard on the worker tells them (KVLOOP_WORKER_SECRET), or vLLM with VLLM_SERVER_DEV_MODE=1; "
            "simulated workers do not",
        )
        return
    extra = config.get("kv_connector_extra_config") or {}
    if not extra.get("bidirectional_kv_xfer"):
        yield Finding(Status.FAULT, part, "runs without bidirectional_kv_xfer", "set it in kv_connector_extra_config")
    if config.get("kv_load_failure_policy") != "recompute":
        yield Finding(Status.WARNING, part, "a failed read fails the turn", "set kv_load_failure_policy: recompute")
    ttl = extra.get("decoder_kv_blocks_ttl", VLLM_TTL_SECONDS)
    if extra.get("bidirectional_kv_xfer"):
        yield Finding(Status.OK, part, f"runs with bidirectional_kv_xfer, keeps KV for {ttl:g} s")
    if worker.role == "decode" and ttl < facts.handle_ttl_seconds:
        yield Finding(
            Status.FAULT,
            part,
            f"keeps KV for {ttl:g} s, less than the gateway believes ({facts.handle_ttl_seconds:g} s)",
            f"set KVLOOP_HANDLE_TTL_SECONDS={ttl:g}",
        )


def _pool(workers: tuple[Worker, ...]) -> Iterator[Finding]:
    for role in ("prefill", "decode"):
        mine = [worker for worker in workers if worker.role == role]
        if not mine:
            yield Finding(
                Status.FAULT, role, "Envoy knows no such worker", f"render Envoy's configuration with --{role}"
            )
        if len({worker.version for worker in mine if worker.version}) > 1:
            yield Finding(Status.WARNING, role, "workers run different vLLM versions", "use one version per pool")
    sizes = {worker.block_size_tokens for worker in workers if worker.block_size_tokens}
    if len(sizes) > 1:
        yield Finding(
            Status.FAULT, "workers", f"KV block sizes differ: {sorted(sizes)}", "give P and D the same --block-size"
        )
    for size in sizes if len(sizes) == 1 else ():
        yield Finding(Status.OK, "workers", f"KV blocks hold {size} tokens everywhere")


# --- the store and the probe --------------------------------------------------------------------------------------------


def _store(store: Store | None, *, extproc_shares: bool) -> Iterator[Finding]:
    part = "store"
    if store is None and extproc_shares:
        yield Finding(
            Status.WARNING,
            part,
            "ext_proc uses a shared store, and KVLOOP_STORE_URL is not set here: the two environments differ",
            "run the doctor with the KVLOOP_* variables of `kvloop serve`",
        )
    elif store is None:
        yield Finding(Status.OK, part, "in memory: right for one ext_proc process")
    elif store.error:
        yield Finding(Status.FAULT, part, "cannot be used", store.error)
    else:
        yield Finding(Status.OK, part, f"Redis {store.version}")
        if not store.takes_once:
            yield Finding(Status.FAULT, part, "GETDEL gave one value out twice", "use a Redis or Valkey server itself")
        if store.eviction not in ("", "noeviction"):
            yield Finding(
                Status.WARNING,
                part,
                f"maxmemory-policy {store.eviction}: evicted handles pin KV on D until its TTL",
                "set maxmemory-policy noeviction",
            )


_SECRET_FIX: Final = "set KVLOOP_WORKER_SECRET to the workers' secret, for `kvloop serve` and here"  # noqa: S105 - advice, not a secret
_FATES: Final = {
    "loopback_host": (
        "D's handles name an address that means this machine",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST on D to one P reaches, or KVLOOP_SINGLE_HOST=true",
    ),
    "push_mode": ("D's connector pushes KV", "run NIXL in pull mode"),
    "unacknowledged": ("the shared store was too slow to keep the handle", "see the store's findings"),
    "store_unavailable": ("the shared store was away", "see the store's findings"),
}
_REASONS: Final = {
    "render_failed": ("P does not render the prompt", "start P with --enable-scale-out"),
    "read_failed": (
        "P did not read D's KV",
        "run both with bidirectional_kv_xfer, and let P reach D's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT)",
    ),
    "prefill_timeout": ("P did not answer with a handle", "run P with bidirectional_kv_xfer and kvloop's plugin"),
    "prefill_unreachable": ("the prefill listener does not answer", "check KVLOOP_PREFILL_URL and P's health"),
    "prefill_failed": ("P failed the prefill leg", "see P's log, and the findings above"),
    "guard_refused": ("the guard on P knows another secret", _SECRET_FIX),
    "prefill_without_kv": ("P runs no KV connector", "start P with `kvloop worker prefill`"),
    "block_size_unknown": ("D's block size is not known", "set KVLOOP_DECODE_BLOCK_SIZE_TOKENS"),
    "blocks_unexplained": ("D's block lists do not fit its block size", "check KVLOOP_DECODE_BLOCK_SIZE_TOKENS"),
    "store_unavailable": ("the shared store was away", "see the store's findings"),
    "reuse_off": ("reuse is switched off", "unset KVLOOP_REUSE"),
    "not_bidirectional": ("the P pool is taken for one without the flag", "unset KVLOOP_PREFILL_BIDIRECTIONAL"),
}


def _probe(facts: Facts) -> Iterator[Finding]:
    part = "probe"
    probe = facts.probe
    if probe is None:
        yield Finding(Status.UNSEEN, part, "no turn was tried", "kvloop doctor --probe plays two small ones")
        return
    if 0 in probe.statuses:
        fix = "name where clients connect: --gateway; or see Envoy's log"
        yield Finding(Status.FAULT, part, f"nothing answers at {probe.url}", fix)
        return
    if set(probe.statuses) != {_HTTP_OK}:
        told = ", ".join(map(str, probe.statuses))
        yield Finding(
            Status.FAULT, part, f"turns were answered with HTTP {told}", "see the findings above, then the logs"
        )
        return
    last = probe.receipts[-1]
    if last.get("outcome") == "reused":
        yield Finding(Status.OK, part, f"the second turn reused {last.get('reused', '?')} tokens")
        return
    yield Finding(Status.FAULT, part, *_why_cold(probe, facts))


def _why_cold(probe: Probe, facts: Facts) -> tuple[str, str]:
    for fate, told in _FATES.items():
        if fate in probe.fates:
            return told
    reasons = [receipt.get("reason", "") for receipt in probe.receipts]
    for reason in reasons:
        if reason in _REASONS:
            return _REASONS[reason]
    if "engine_draining" in probe.releases:
        return (
            "this D was told to stop (DELETE /engines/...): what it would keep is released",
            "restart D, or kvloop if D shall go on",
        )
    if reasons[-1] == "nothing_kept":
        if any(_version(worker.version or "") < STREAMS_HANDLES for worker in facts.workers if worker.role == "decode"):
            return (
                "D streams no handles: vLLM below 0.33 without kvloop's plugin",
                "install kvloop beside vLLM on D and start it with `kvloop worker decode`",
            )
        return "D published no handle", "run D with a KV connector and bidirectional_kv_xfer (`kvloop worker decode`)"
    return (
        f"the second turn was not reused: {reasons[-1] or 'no receipt'}",
        "docs/life-of-a-request.md explains the word",
    )


def _version(text: str) -> tuple[int, ...]:
    parts = text.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())
