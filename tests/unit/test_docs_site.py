"""The documentation builds into a site: every link and anchor leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from extproc.settings import EnvoySettings, GatewaySettings

ROOT = Path(__file__).parent.parent.parent
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(  # noqa: S603 - our own command
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return directory


def test_it_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()


class _Loads(HTMLParser):
    """Notes what a browser fetches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name == LOADED.get(tag)]


def test_a_reader_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert loads.addresses
        assert [address for address in loads.addresses if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url|@import)\s*\(?[\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_page_is_reached_from_the_first(site: Path) -> None:
    first = (site / "index.html").read_text()
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    assert {page for page in pages if f'href="{page}"' not in first and page != "index.html"} == set()


def test_every_variable_the_documentation_names_is_read_somewhere() -> None:
    known = {
        f"{kind.model_config['env_prefix']}{field.upper()}"
        for kind in (GatewaySettings, EnvoySettings)
        for field in kind.model_fields
    }
    for package in ("extproc", "workers", "bench"):
        for source in (ROOT / package).rglob("*.py"):
            known |= set(re.findall(r'"(KVLOOP_[A-Z0-9_]+)"', source.read_text()))
    written = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("deploy/**/*")]
    for page in (path for path in written if path.is_file()):
        named = set(re.findall(r"\bKVLOOP_[A-Z0-9_]*[A-Z0-9]\b(?!_\*|\*)", page.read_text()))
        assert named - known == set(), page
