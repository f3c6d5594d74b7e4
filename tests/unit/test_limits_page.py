"""docs/limits.md names real settings with their real defaults."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest

from extproc.endpoints import CHAT
from extproc.errors import ClientError
from extproc.request import MAX_MEMBERS, parse_request
from extproc.settings import EnvoySettings, GatewaySettings

PAGE = (Path(__file__).parent.parent.parent / "docs/limits.md").read_text()
DEFAULTS = {
    f"{kind.model_config.get('env_prefix')}{name.upper()}": str(field.default)
    for kind in (GatewaySettings, EnvoySettings)
    for name, field in kind.model_fields.items()
}
NAMED = dict(re.findall(r"`(KVLOOP_\w+)` (?:\| |\()([\d.]+)", PAGE))


def test_every_limit_named_has_its_default() -> None:
    assert len(NAMED) > 20
    assert {name: DEFAULTS[name] for name in NAMED} == NAMED


def test_every_bound_among_the_settings_is_on_the_page() -> None:
    bounds = [name for name in DEFAULTS if re.search(r"_MAX_|_TIMEOUT_SECONDS$", name)]
    # How long workers are waited for in health checks and idle connections bounds nothing a client can make large.
    others = {"KVLOOP_ENVOY_HEALTH_TIMEOUT_SECONDS", "KVLOOP_ENVOY_WORKER_IDLE_TIMEOUT_SECONDS"}
    assert {name for name in bounds if name not in PAGE} <= others


def test_members_are_bounded_as_the_page_says() -> None:
    assert f"| {MAX_MEMBERS:,} |" in PAGE


@pytest.mark.parametrize(("depth", "is_read"), [(1000, True), (1100, False)])
def test_json_goes_about_a_thousand_levels_deep(depth: int, is_read: bool) -> None:
    body = b'{"x":' * depth + b"1" + b"}" * depth
    if is_read:
        assert parse_request(CHAT, body).raw == body
        return
    with pytest.raises(ClientError) as refused:
        parse_request(CHAT, body)
    assert (refused.value.status, orjson.loads(refused.value.body)["error"]["code"]) == (400, "invalid_json")
