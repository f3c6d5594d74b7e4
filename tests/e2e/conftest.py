"""One real stack for all end-to-end tests: real vLLM P and D on the tiny model, real NIXL, real Envoy, ext_proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_client import MODEL, Gateway

from workers.models import prepare_tiny
from workers.stack import Stack, StackOptions

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session", params=["digest", "token_ids"])
def stack(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose D carries our digest, and one whose D does not, so that kvloop asks it for token ids.

    P runs without prefix caching, as if every turn met another P: what P did not compute it has read from D.
    """
    options = StackOptions(
        model=model,
        run_directory=tmp_path_factory.mktemp(f"stack-{request.param}"),
        served_model_name=MODEL,
        prefill={"prefix_caching": False},
        decode={"digest": request.param == "digest"},
    )
    with Stack(options, lambda progress: print(f"[{request.param}] {progress}", flush=True)) as stack:
        yield stack


@pytest.fixture
def digest(stack: Stack) -> bool:
    """Whether the running D's handles carry the plugin's digest."""
    return bool(stack.options.decode["digest"])


@pytest.fixture
def gateway(stack: Stack) -> Gateway:
    stack.check()
    return Gateway(stack)
