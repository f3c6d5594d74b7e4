"""The documentation says what the code does."""

from __future__ import annotations

import re
import subprocess
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


def test_no_file_holds_what_a_merge_left_behind() -> None:
    marker = re.compile(rb"^(<{7} |={7}$|>{7} )", re.MULTILINE)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")  # noqa: S607
    files = [ROOT / name.decode() for name in tracked if name]
    assert len(files) > 100
    assert [file for file in files if file.is_file() and marker.search(file.read_bytes())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_local_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
