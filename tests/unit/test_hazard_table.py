"""docs/hazards.md and the tests that carry its numbers say the same."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LEVELS = {"unit": "pure", "gateway": "real Envoy", "e2e": "real vLLM"}
LINES = 49
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| `(\w+)` \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"test_hazard_((?:\d+_)+)[a-z]")


def numbers_of(test: str) -> set[int]:
    """The lines a test's name says it proves: ``test_hazard_07_25_a_worker…`` is for 7 and 25."""
    found = NAME.match(test)
    return {int(number) for number in found[1].split("_") if number} if found else set()


TESTS = {
    node.name: LEVELS.get(path.parent.name, path.parent.name)
    for path in ROOT.glob("tests/*/test_*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}
ROWS = {int(number): (test, levels.split(", ")) for number, _, _, test, levels in ROW.findall(
    (ROOT / "docs/hazards.md").read_text()
)}  # fmt: skip


def test_the_table_has_every_line_once_and_in_order() -> None:
    page = (ROOT / "docs/hazards.md").read_text()
    assert [int(number) for number in re.findall(r"^\| (\d+) ", page, re.MULTILINE)] == [*range(1, LINES + 1)]
    assert [*ROWS] == [*range(1, LINES + 1)]


@pytest.mark.parametrize("number", range(1, LINES + 1))
def test_the_deciding_test_exists_and_carries_the_number(number: int) -> None:
    test, _ = ROWS[number]
    assert test in TESTS
    assert number in numbers_of(test)


def test_on_every_level_named_there_is_a_test_with_the_number() -> None:
    levels: dict[int, set[str]] = defaultdict(set)
    for test, level in TESTS.items():
        for number in numbers_of(test):
            levels[number].add(level)
    assert {
        number: set(said) - levels[number] for number, (_, said) in ROWS.items() if set(said) - levels[number]
    } == {}


def test_numbers_have_two_digits_so_that_they_can_be_searched_for() -> None:
    odd = [test for test in TESTS if "hazard" in test and not re.match(r"test_hazard_(\d\d_)+[a-z]", test)]
    assert [test for test in odd if not test.startswith("test_the_")] == []
