"""When a turn is read back early."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.policy import returns_early


@pytest.mark.parametrize(
    ("mode", "chance", "d_under_pressure", "expected"),
    [
        ("lazy", 1.0, True, False),
        ("eager", 0.0, False, True),
        ("adaptive", 0.6, False, True),
        ("adaptive", 0.4, False, False),
        ("adaptive", 0.4, True, True),
        ("adaptive", 0.1, True, False),
    ],
)
def test_early_if_it_pays(mode: Any, chance: float, d_under_pressure: bool, expected: bool) -> None:
    assert returns_early(mode, chance=chance, d_under_pressure=d_under_pressure) is expected
