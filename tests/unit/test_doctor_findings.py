"""Every fact that means something is told, with what to do about it; the facts of a healthy deployment mean nothing bad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from extproc.doctor_findings import Envoy, Facts, Finding, Probe, Status, Store, Worker, examine, worst

KIND = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3."
MODES = {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "STREAMED"}
KV_CONFIG = {
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 480},
}


def config(*, modes: dict[str, str] = MODES, route: dict[str, Any] | None = None, **of_filter: Any) -> dict[str, Any]:
    overrides = {"@type": f"{KIND}ExtProcPerRoute", "overrides": {"processing_mode": modes}}
    disabled = {"@type": f"{KIND}ExtProcPerRoute", "disabled": True}
    filters = [{"typed_config": {"@type": f"{KIND}ExternalProcessor", "allow_mode_override": True, **of_filter}}]
    routes = [
        {"route": {"cluster": "decode", **(route or {})}, "typed_per_filter_config": {"kvloop.ext_proc": overrides}},
        {"typed_per_filter_config": {"kvloop.ext_proc": disabled}},
    ]
    return {"configs": [{"http_filters": filters, "routes": routes}]}


def facts(**changes: Any) -> Facts:
    healthy = Facts(
        envoy=Envoy("1.40.0", config()),
        extproc_metrics={"kvloop_store_up": 1.0, "kvloop_prompt_ids_differed": 0.0},
        workers=(
            Worker("prefill", "10.0.0.1:8100", "0.33.0", 16, 200, KV_CONFIG),
            Worker("decode", "10.0.0.2:8200", "0.33.0", 16, 0, KV_CONFIG),
        ),
        store=Store(version="7.0.15", eviction="noeviction", takes_once=True),
        probe=Probe((200, 200), ({"outcome": "cold"}, {"outcome": "reused", "reused": "200"})),
    )
    return replace(healthy, **changes)


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status is not Status.OK]


def test_a_healthy_deployment_has_no_bad_findings() -> None:
    findings = examine(facts())
    assert bad(findings) == []
    assert worst(findings) is Status.OK
    assert worst([]) is Status.OK


def workers(**of_decode: Any) -> tuple[Worker, ...]:
    prefill, decode = facts().workers
    return prefill, replace(decode, **of_decode)


def probed(*receipts: dict[str, str], fates: frozenset[str] = frozenset()) -> Probe:
    return Probe((200,) * len(receipts), receipts, fates)


COLD = {"outcome": "cold", "reason": "nothing_kept"}
CASES: dict[str, tuple[dict[str, Any], Status, str, str]] = {
    "no Envoy": ({"envoy": Envoy()}, Status.FAULT, "does not answer", "--envoy-admin"),
    "old Envoy": ({"envoy": Envoy("1.31.2", config())}, Status.WARNING, "1.31.2", "upgrade"),
    "no filter": ({"envoy": Envoy("1.40.0", {})}, Status.FAULT, "no route", "kvloop envoy render"),
    "fails open": ({"envoy": Envoy("1.41.0", config(failure_mode_allow=True))}, Status.FAULT, "passed by", "false"),
    "no override": (
        {"envoy": Envoy("1.40.0", config(allow_mode_override=False))},
        Status.WARNING,
        "a message per token",
        "allow_mode_override",
    ),
    "request mode": (
        {"envoy": Envoy("1.40.0", config(modes={**MODES, "request_body_mode": "BUFFERED"}))},
        Status.FAULT,
        "request bodies",
        "FULL_DUPLEX_STREAMED",
    ),
    "response mode": (
        {"envoy": Envoy("1.40.0", config(modes={**MODES, "response_body_mode": "NONE"}))},
        Status.FAULT,
        "answers",
        "STREAMED",
    ),
    "retries": (
        {"envoy": Envoy("1.40.0", config(route={"retry_policy": {}}))},
        Status.FAULT,
        "twice",
        "remove retry_policy",
    ),
    "no ext_proc": ({"extproc_metrics": None}, Status.FAULT, "does not answer", "kvloop serve"),
    "prompt ids": ({"extproc_metrics": {"kvloop_prompt_ids_differed": 1.0}}, Status.FAULT, "other tokens", "restart"),
    "store down": ({"extproc_metrics": {"kvloop_store_up": 0.0}}, Status.FAULT, "shared store", "store_unavailable"),
    "reuse off": ({"reuse": False}, Status.FAULT, "switched off", "KVLOOP_REUSE"),
    "not bidirectional": ({"bidirectional": False}, Status.FAULT, "without bidirectional", "KVLOOP_PREFILL"),
    "worker away": ({"workers": workers(version=None)}, Status.FAULT, "does not answer", "start it"),
    "no block size": ({"workers": workers(block_size_tokens=None)}, Status.WARNING, "block size", "DECODE_BLOCK_SIZE"),
    "block sizes": ({"workers": workers(block_size_tokens=32)}, Status.FAULT, "[16, 32]", "--block-size"),
    "no flag": (
        {"workers": workers(kv_config={"kv_load_failure_policy": "recompute"})},
        Status.FAULT,
        "without",
        "set it",
    ),
    "policy": (
        {"workers": workers(kv_config={**KV_CONFIG, "kv_load_failure_policy": "fail"})},
        Status.WARNING,
        "fails the turn",
        "recompute",
    ),
    "ttl": ({"handle_ttl_seconds": 900.0}, Status.FAULT, "480 s", "KVLOOP_HANDLE_TTL_SECONDS=480"),
    "no worker": ({"workers": ()}, Status.FAULT, "knows no such worker", "--prefill"),
    "unseen": ({"workers": workers(kv_config=None)}, Status.UNSEEN, "cannot be seen", "VLLM_SERVER_DEV_MODE"),
    "no decode": ({"workers": facts().workers[:1]}, Status.FAULT, "knows no such worker", "--decode"),
    "versions": (
        {"workers": (*facts().workers, replace(facts().workers[1], version="0.34.0"))},
        Status.WARNING,
        "different vLLM",
        "one version",
    ),
    "no render": (
        {"workers": (replace(facts().workers[0], render_status=403), facts().workers[1])},
        Status.FAULT,
        "HTTP 403",
        "--enable-scale-out",
    ),
    "store error": ({"store": Store(error="do this")}, Status.FAULT, "cannot be used", "do this"),
    "takes twice": ({"store": Store(version="7", takes_once=False)}, Status.FAULT, "twice", "itself"),
    "evicts": (
        {"store": Store(version="7", eviction="allkeys-lru", takes_once=True)},
        Status.WARNING,
        "allkeys-lru",
        "noeviction",
    ),
    "another environment": (
        {"store": None, "extproc_shares_store": True},
        Status.WARNING,
        "the two environments differ",
        "KVLOOP_* variables",
    ),
    "not probed": ({"probe": None}, Status.UNSEEN, "no turn", "--probe"),
    "probe refused": ({"probe": Probe((503, 503), ({}, {}))}, Status.FAULT, "503", "above"),
    "nothing there": (
        {"probe": Probe((0, 0), ({}, {}), url="http://127.0.0.1:1")},
        Status.FAULT,
        "nothing answers at http://127.0.0.1:1",
        "--gateway",
    ),
    "not ready": (
        {"extproc_obstacle": "Envoy's prefill listener 127.0.0.1:1 does not answer"},
        Status.FAULT,
        "127.0.0.1:1 does not answer",
        "KVLOOP_PREFILL_URL",
    ),
    "another secret": (
        {"workers": workers(kv_config=None, refuses_secret=True)},
        Status.FAULT,
        "another secret",
        "KVLOOP_WORKER_SECRET",
    ),
    "guard refused": (
        {"probe": probed({"outcome": "decode_only", "reason": "guard_refused"})},
        Status.FAULT,
        "another secret",
        "KVLOOP_WORKER_SECRET",
    ),
    "draining D": (
        {"probe": replace(probed(COLD, COLD), releases=frozenset({"engine_draining"}))},
        Status.FAULT,
        "told to stop",
        "restart D",
    ),
    "loopback": (
        {"probe": probed(COLD, COLD, fates=frozenset({"loopback_host"}))},
        Status.FAULT,
        "this machine",
        "SIDE",
    ),
    "read failed": (
        {"probe": probed(COLD, {"outcome": "cold", "reason": "read_failed"})},
        Status.FAULT,
        "did not read",
        "side channel",
    ),
    "no handles": (
        {"workers": workers(version="0.32.0"), "probe": probed(COLD, COLD)},
        Status.FAULT,
        "streams no handles",
        "plugin",
    ),
    "no handle": ({"probe": probed(COLD, COLD)}, Status.FAULT, "published no handle", "KV connector"),
    "unknown": (
        {"probe": probed(COLD, {"outcome": "cold", "reason": "too_short"})},
        Status.FAULT,
        "too_short",
        "life-of-a-request",
    ),
    "no receipt": ({"probe": probed({}, {})}, Status.FAULT, "no receipt", "life-of-a-request"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fact_is_told_with_its_fix(name: str) -> None:
    changes, status, text, fix = CASES[name]
    found = bad(examine(facts(**changes)))
    assert any(
        finding.status is status and text in finding.text and fix in finding.fix + finding.text for finding in found
    ), found


def test_without_envoy_nothing_is_said_of_workers() -> None:
    found = bad(examine(facts(envoy=Envoy(), workers=())))
    assert [finding.part for finding in found] == ["Envoy"]


def test_a_worker_that_fails_is_no_word_about_the_secret() -> None:
    found = bad(examine(facts(probe=probed({"outcome": "decode_only", "reason": "prefill_failed"}))))
    assert [finding.part for finding in found] == ["probe"]
    assert "SECRET" not in found[0].fix


def test_in_memory_is_right_for_one_process() -> None:
    assert bad(examine(facts(store=None))) == []
