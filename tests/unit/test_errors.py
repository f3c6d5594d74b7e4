"""Errors as OpenAI's SDKs read them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ClientError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "invalid_request_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_body_is_an_openai_error(status: int, kind: str) -> None:
    error = ClientError(status, "No.", code="no", param="messages")
    assert json.loads(error.body) == {"error": {"message": "No.", "type": kind, "param": "messages", "code": "no"}}
    assert error.status == status
    assert str(error) == "No."


def test_a_parameter_may_be_left_out() -> None:
    assert json.loads(ClientError(400, "No.", code="no").body)["error"]["param"] is None


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_message_survives(message: str) -> None:
    assert json.loads(ClientError(400, message, code="no").body)["error"]["message"] == message
