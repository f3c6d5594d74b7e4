"""How each peer is put in front of the workers. All run on the one core kept for what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.site import HOST, Front, envoy_alone, free_ports, get, kvloop
from workers.venvs import FASTAPI, VLLM_ROUTER, Environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.site import Site


@dataclass(frozen=True, slots=True)
class Peer:
    """Something to measure. ``front`` None: the load generator talks to the workers itself.

    ``does_both_legs``: prefill on P, KV to D, decode on D. The others let D do all, so their TTFT is no rival's.
    """

    name: str
    about: str
    does_both_legs: bool
    front: Callable[[Site], Front] | None = None
    environment: Environment | None = None


def _token_ids(site: Site) -> Front:
    return kvloop(site, {"KVLOOP_SEQUENCE_SOURCE": "token_ids"})


def _fastapi(site: Site) -> Front:
    (port,) = free_ports(1)
    argv = (
        *(FASTAPI.program("python"), str(Path(__file__).with_name("fastapi_proxy.py")), "--port", str(port)),
        *("--prefill", *_urls(site.prefill), "--decode", *_urls(site.decode)),
    )
    return Front(port, [site.component("FastAPI", argv)], lambda: answers(port))


def _vllm_router(site: Site) -> Front:
    port, metrics_port = free_ports(2)
    argv = (
        *(VLLM_ROUTER.program("vllm-router"), "--vllm-pd-disaggregation", "--host", HOST, "--port", str(port)),
        *(word for url in _urls(site.prefill) for word in ("--prefill", url)),
        *(word for url in _urls(site.decode) for word in ("--decode", url)),
        *("--worker-startup-check-interval", "1", "--prometheus-port", str(metrics_port), "--log-level", "warning"),
    )
    return Front(port, [site.component("vllm-router", argv)], lambda: answers(port))


LEGS: Final = "two legs, no proxy"
KVLOOP: Final = "kvloop"
PEERS: Final = (
    Peer(LEGS, "the load generator itself calls P, then D: the legs' own time", does_both_legs=True),
    Peer("worker directly", "D alone, no prefill leg", does_both_legs=False),
    Peer("Envoy alone", "the same Envoy without ext_proc, D alone", does_both_legs=False, front=envoy_alone),
    Peer(KVLOOP, "D's handles carry the digest", does_both_legs=True, front=kvloop),
    Peer("kvloop, token ids", "as with a stock D: token ids on every chunk", does_both_legs=True, front=_token_ids),
    Peer(
        "FastAPI + httpx",
        "bench/peers/fastapi_proxy.py, one process",
        does_both_legs=True,
        front=_fastapi,
        environment=FASTAPI,
    ),
    Peer(
        "vllm-router 0.1.17",
        "Rust, from PyPI, with its default policy",
        does_both_legs=True,
        front=_vllm_router,
        environment=VLLM_ROUTER,
    ),
)


def answers(port: int) -> bool:
    """Say whether somebody serves ``/health`` there."""
    try:
        return get(port, "/health")[0] == OK
    except OSError:
        return False


OK: Final = 200


def _urls(ports: list[int]) -> list[str]:
    return [f"http://{HOST}:{port}" for port in ports]
