"""Which requests are kvloop's business."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Dialect, Endpoint, find_endpoint


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("query", ["", "?", "?a=b", "?path=/v1/models?"])
def test_a_handled_path_is_found_with_any_query(endpoint: Endpoint, query: str) -> None:
    assert find_endpoint("POST", endpoint.path + query) is endpoint


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "post", ""])
def test_hazard_31_only_post_is_handled(method: str) -> None:
    assert find_endpoint(method, CHAT.path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/health",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/chat/completions/render",
        "/v1/chat/completions/",
        "/v1/completions/x",
        "/V1/completions",
        "/",
        "",
        "*",
        "?/v1/completions",
    ],
)
def test_hazard_48_every_other_path_is_left_alone(path: str) -> None:
    assert find_endpoint("POST", path) is None


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_method_and_path_have_an_answer(method: str, path: str) -> None:
    found = find_endpoint(method, path)
    assert found is None or (method, path.split("?", maxsplit=1)[0]) == ("POST", found.path)


def test_each_dialect_has_one_endpoint_and_its_prompts_are_rendered_below_it() -> None:
    assert [endpoint.dialect for endpoint in ENDPOINTS] == [Dialect.CHAT, Dialect.COMPLETIONS]
    assert (CHAT, COMPLETIONS) == ENDPOINTS
    assert all(endpoint.render_path == endpoint.path + "/render" for endpoint in ENDPOINTS)
