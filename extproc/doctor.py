"""``kvloop doctor``: ask every part of a deployment how it is, and say what to change. Changes nothing itself."""

from __future__ import annotations

import argparse  # noqa: TC003 - the CLI contract of every command module
import asyncio
import json
import secrets
import sys
from dataclasses import asdict
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from extproc import headers as names
from extproc.doctor_findings import Envoy, Facts, Finding, Probe, Status, Store, Worker, examine, worst
from extproc.errors import ConfigError
from extproc.settings import EnvoySettings, GatewaySettings
from extproc.worker_metrics import read_engine_load

TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
PROBE_TIMEOUT: Final = aiohttp.ClientTimeout(total=180)
_MARKS: Final = {Status.OK: "ok     ", Status.UNSEEN: "unseen ", Status.WARNING: "WARNING", Status.FAULT: "FAULT  "}
_AWAY: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError)
_UNAVAILABLE: Final = 503
_PROBE_WORDS: Final = "one two three four five six seven eight nine ten " * 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where to look; what else there is comes from the gateway's own settings."""
    parser.add_argument("--envoy-admin", metavar="HOST:PORT", help="Envoy's admin port (KVLOOP_ENVOY_ADMIN_LISTEN)")
    parser.add_argument("--gateway", metavar="URL", help="where clients connect (http:// and KVLOOP_ENVOY_LISTEN)")
    parser.add_argument("--probe", action="store_true", help="also play two small turns through the gateway")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.epilog = (
        "Reads the KVLOOP_* variables `kvloop serve` runs with. Exit status: 0 all well, 1 a fault, 2 misuse."
    )


def main(args: argparse.Namespace) -> int:
    """Examine, tell; returns the exit status."""
    settings, envoy = GatewaySettings(), EnvoySettings()
    if "/" in (args.envoy_admin or ""):
        raise ConfigError(f"--envoy-admin {args.envoy_admin}: HOST:PORT, without a scheme or path")
    if not (args.gateway or "http://").startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {args.gateway}: a URL, like http://{args.gateway}")
    admin = f"http://{args.envoy_admin or envoy.admin_listen}"
    findings = examine(asyncio.run(gather(settings, admin, args.gateway or f"http://{envoy.listen}", probe=args.probe)))
    sys.stdout.write(_as_json(findings) if args.json else _as_text(findings))
    return int(worst(findings) is Status.FAULT)


def _as_json(findings: list[Finding]) -> str:
    return (
        json.dumps({"status": worst(findings), "findings": [asdict(finding) for finding in findings]}, indent=2) + "\n"
    )


def _as_text(findings: list[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]} {finding.part}: {finding.text}\n")
        if finding.fix:
            lines.append(f"        -> {finding.fix}\n")
    return "".join(lines)


async def gather(settings: GatewaySettings, admin_url: str, gateway_url: str, *, probe: bool) -> Facts:
    """Ask everybody; whoever does not answer is noted as such."""
    async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False) as session:
        envoy, (addresses, metrics, obstacle), state = await asyncio.gather(
            _ask_envoy(session, admin_url),
            asyncio.gather(
                _worker_addresses(session, admin_url), _ask_extproc(session, settings), _obstacle(session, settings)
            ),
            _json(session, f"http://{settings.admin_listen}/debug/state?limit=0"),
        )
        workers = await asyncio.gather(*(_ask_worker(session, settings, *where) for where in addresses))
        model = next((name for _, name in workers if name), None)
        return Facts(
            envoy=envoy,
            extproc_metrics=metrics,
            extproc_obstacle=obstacle,
            extproc_shares_store=isinstance(state, dict) and state.get("shared_store") is True,
            workers=tuple(worker for worker, _ in workers),
            store=await _ask_store(settings),
            probe=await _play(session, settings, gateway_url, model) if probe else None,
            handle_ttl_seconds=settings.handle_ttl_seconds,
            single_host=settings.single_host,
            reuse=settings.reuse,
            bidirectional=settings.prefill_bidirectional,
        )


def _own_headers(settings: GatewaySettings) -> dict[str, str]:
    """Return what the gateway's own requests to workers carry."""
    headers = {} if settings.worker_secret is None else {names.SECRET: settings.worker_secret.get_secret_value()}
    if settings.worker_api_key is not None:
        headers["authorization"] = f"Bearer {settings.worker_api_key.get_secret_value()}"
    return headers


async def _json(session: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None) -> Any:
    """Return a GET's JSON, None if there is none."""
    try:
        async with session.get(url, headers=headers) as response:
            return await response.json(content_type=None) if response.ok else None
    except _AWAY:
        return None


async def _text(session: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with session.get(url) as response:
            return await response.text() if response.ok else None
    except _AWAY:
        return None


async def _ask_envoy(session: aiohttp.ClientSession, admin_url: str) -> Envoy:
    info, config = await asyncio.gather(
        _json(session, f"{admin_url}/server_info"), _json(session, f"{admin_url}/config_dump")
    )
    if not isinstance(info, dict):
        return Envoy()
    _, _, version = str(info.get("version", "")).partition("/")  # "commit/1.40.0/Clean/RELEASE/BoringSSL"
    return Envoy(version.partition("/")[0], config if isinstance(config, dict) else {})


async def _worker_addresses(session: aiohttp.ClientSession, admin_url: str) -> list[tuple[str, str]]:
    """Return (role, address) of the workers Envoy knows, from the clusters ``kvloop envoy render`` names so."""
    found: list[tuple[str, str]] = []
    clusters = await _json(session, f"{admin_url}/clusters?format=json") or {}
    for cluster in clusters.get("cluster_statuses", []):
        role = cluster.get("name")
        for host in cluster.get("host_statuses", []) if role in ("prefill", "decode") else []:
            socket = host.get("address", {}).get("socket_address", {})
            found.append((role, f"{socket.get('address')}:{socket.get('port_value')}"))
    return sorted(found, reverse=True)


async def _ask_extproc(session: aiohttp.ClientSession, settings: GatewaySettings) -> dict[str, float] | None:
    """Return ext_proc's samples by name and label values, None if it does not answer."""
    text = await _text(session, f"http://{settings.admin_listen}/metrics")
    if text is None:
        return None
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join((sample.name, *sample.labels.values())): sample.value for sample in samples}


async def _obstacle(session: aiohttp.ClientSession, settings: GatewaySettings) -> str:
    """Return what ext_proc says keeps it from serving, empty if nothing does."""
    try:
        async with session.get(f"http://{settings.admin_listen}/readyz") as response:
            return (await response.text()).strip() if response.status == _UNAVAILABLE else ""
    except _AWAY:
        return ""


async def _ask_worker(
    session: aiohttp.ClientSession, settings: GatewaySettings, role: str, address: str
) -> tuple[Worker, str | None]:
    """Return a worker's facts and its model's name."""
    url, headers = f"http://{address}", _own_headers(settings)
    version, models, metrics, (told, refuses), info = await asyncio.gather(
        _json(session, f"{url}/version"),
        _json(session, f"{url}/v1/models", headers),
        _text(session, f"{url}/metrics"),
        _kv_config(session, url, headers),
        _json(session, f"{url}/server_info?config_format=json", headers),
    )
    if not isinstance(version, dict):
        return Worker(role, address), None
    served = models.get("data") if isinstance(models, dict) else None
    model = served[0].get("id") if served else None
    load = read_engine_load(metrics) if metrics is not None else None
    worker = Worker(
        role=role,
        address=address,
        version=str(version.get("version")),
        block_size_tokens=None if load is None else load.block_size_tokens,
        render_status=await _render_status(session, settings, url, model) if role == "prefill" else 0,
        kv_config=told if isinstance(told, dict) and told else _find(info, "kv_transfer_config"),
        refuses_secret=refuses,
    )
    return worker, model


async def _kv_config(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[Any, bool]:
    """Return what the guard tells of the worker's KV transfer, and whether it knows another secret than ours."""
    try:
        async with session.get(f"{url}/kvloop/kv-config", headers=headers) as response:
            answer = await response.json(content_type=None)
            if response.ok:
                return answer, False
            error = answer.get("error") if isinstance(answer, dict) else None
            return None, isinstance(error, dict) and error.get("code") == names.GUARD_CODE
    except _AWAY:
        return None, False


async def _render_status(session: aiohttp.ClientSession, settings: GatewaySettings, url: str, model: str | None) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    try:
        async with session.post(
            f"{url}/v1/chat/completions/render", json=body, headers=_own_headers(settings)
        ) as response:
            return response.status
    except _AWAY:
        return 0


def _find(value: Any, key: str) -> dict[str, Any] | None:
    """Return the object under ``key``, at whatever depth vLLM puts it."""
    if not isinstance(value, dict):
        return None
    found = value.get(key)
    if isinstance(found, dict):
        return found
    return next((inner for member in value.values() if (inner := _find(member, key)) is not None), None)


async def _ask_store(settings: GatewaySettings) -> Store | None:
    if settings.store_url is None:
        return None
    try:
        from extproc.doctor_store import examine_store  # noqa: PLC0415 - redis-py is an extra
    except ModuleNotFoundError:
        return Store(error="pip install '.[redis]' in a checkout")
    return await examine_store(settings)


async def _play(
    session: aiohttp.ClientSession, settings: GatewaySettings, gateway_url: str, model: str | None
) -> Probe:
    """Play two turns of one conversation that ends with them."""
    before = await _ask_extproc(session, settings) or {}
    headers = {settings.conversation_headers[0]: f"kvloop-doctor-{secrets.token_hex(8)}"}
    messages = [{"role": "user", "content": _PROBE_WORDS}]
    statuses: list[int] = []
    receipts: list[dict[str, str]] = []
    for turn in range(2):
        ends = {names.END: "true"} if turn else {}
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
        try:
            status, receipt, text = await _turn(session, gateway_url, body, headers | ends)
        except _AWAY:
            status, receipt, text = 0, "", ""
        statuses.append(status)
        receipts.append(dict(item.split("=", 1) for item in receipt.split(", ") if "=" in item))
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    after = await _ask_extproc(session, settings) or {}
    risen = [key.split() for key in after if after[key] > before.get(key, 0)]
    fates = {labels[0] for name, *labels in risen if name == "kvloop_handles_captured_total"}
    released = {labels[0] for name, *labels in risen if name == "kvloop_releases_total"}
    return Probe(tuple(statuses), tuple(receipts), frozenset(fates), frozenset(released), gateway_url)


async def _turn(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[int, str, str]:
    """Return a turn's status, receipt and text."""
    path = f"{url}/v1/chat/completions"
    async with session.post(path, json=body, headers=headers, timeout=PROBE_TIMEOUT) as response:
        raw = await response.read()
        events = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
        choices = [choice for event in events for choice in event.get("choices", [])]
        text = "".join(choice.get("delta", {}).get("content") or "" for choice in choices)
        return response.status, response.headers.get(names.RECEIPT, ""), text
