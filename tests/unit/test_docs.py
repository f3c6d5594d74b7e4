"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.receipt import Outcome
from extproc.settings import as_markdown

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])


def test_the_settings_page_is_current() -> None:
    assert (ROOT / "docs/settings.md").read_text() == as_markdown()


def test_every_outcome_is_explained() -> None:
    page = (ROOT / "docs/life-of-a-request.md").read_text()
    assert [outcome for outcome in Outcome if f"`{outcome}`" not in page and outcome is not Outcome.PASSED] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_local_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
