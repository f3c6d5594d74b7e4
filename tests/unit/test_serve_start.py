"""What ``kvloop serve`` says of its settings before it serves."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from structlog.testing import capture_logs

from extproc import server


def told_at_start(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is logged up to where serving would begin."""
    monkeypatch.setattr(server, "configure_logging", lambda _: None)
    monkeypatch.setattr(server.uvloop, "run", lambda serving: serving.close())
    with capture_logs() as logs:
        assert server.main(argparse.Namespace(processes=1, control_fd=None, admin_socket=None)) == 0
    return logs


def test_a_gateway_without_a_worker_secret_says_what_that_means_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOP_WORKER_SECRET", raising=False)
    (told,) = told_at_start(monkeypatch)
    assert (told["log_level"], told["event"]) == ("warning", "no_worker_secret")
    assert "KVLOOP_WORKER_SECRET" in told["fix"]


def test_with_one_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_WORKER_SECRET", "secret")
    assert told_at_start(monkeypatch) == []
