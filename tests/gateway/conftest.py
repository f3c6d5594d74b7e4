"""Fixtures of the gateway tests: the real Envoy, the real ext_proc, simulated workers.

``gateway`` is shared by the whole session and clean at the start of each test; afterwards it must hold that no turn ever
attended to wrong KV and no handle was used twice. Tests that break parts of it, or want other workers or settings, start
their own with ``start_gateway``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Gateway, worker

HERE = Path(__file__).parent

MUST_STAY_ZERO = (
    "wrong_kv_turns",
    "poisoned_blocks_cached",
    "handles_used_twice",
    "handles_used_late",
    "unguarded_requests",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gateway)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the parts' logs with a failed test."""
    report = yield
    if report.failed:
        for gateway in {id(value): value for value in _gateways(item)}.values():
            report.sections.append(("gateway logs", gateway.logs()))
    return report


@pytest.fixture(scope="session")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    with Gateway(directory, prefill=[worker("prefill")] * 2, decode=[worker("decode")] * 2) as started:
        yield started


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Iterator[Gateway]:
    """Two prefill and two decode workers behind one ext_proc. Do not break its parts: others use it after you."""
    shared_gateway.fleet.reset()
    yield shared_gateway
    shared_gateway.fleet.call(lambda: [worker.clear_faults() for worker in shared_gateway.fleet.workers])
    check(shared_gateway)


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Return a function that starts a gateway of your own: ``start_gateway(prefill=[…], decode=[…], replicas=2)``.

    Arguments as for ``Gateway``; without workers you get one of each, made by ``worker``. It is checked like the shared
    one when the test ends, less the counters named in ``allowed``.
    """
    with ExitStack() as started:

        def start(*, allowed: tuple[str, ...] = (), **options: Any) -> Gateway:
            options = {"prefill": [worker("prefill")], "decode": [worker("decode")], **options}
            directory = tmp_path / f"gateway-{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            gateway = started.enter_context(Gateway(directory, **options))
            started.callback(check, gateway, allowed)
            return gateway

        yield start


def check(gateway: Gateway, allowed: tuple[str, ...] = ()) -> None:
    """Assert what must hold after every test, whatever it did."""
    report = gateway.report()
    found = {key: report[key] for key in MUST_STAY_ZERO if key not in allowed and report[key]}
    assert not found, found
    died = [worker["engine_id"] for worker in report["workers"] if worker["engine_dead"]]
    assert not died, died


def _gateways(item: pytest.Item) -> list[Gateway]:
    values = getattr(item, "funcargs", {}).values()
    return [value for value in values if isinstance(value, Gateway)]
