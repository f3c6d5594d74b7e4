"""Make a site of pages that are written for the repository: some lie outside docs/, and many link to code.

Pages named in ``OUTSIDE`` join the site under their own path. Links to them, which lead out of docs/, are bent; links to
files that are no pages (code, manifests) become plain text, since the site is read without the repository. Pages that
mkdocs.yml does not place come last, under "More".
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "deploy/observability/README.md",
    "envoy/README.md",
    "workers/README.md",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside docs/, and place those that nobody placed."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    more = sorted({file.src_uri for file in files.documentation_pages()} - set(_placed(config.nav)))
    if more:
        config.nav.append({"More": more})
    return files


def _placed(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _placed(part)


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Bend the links of one page."""
    name = page.file.src_uri
    in_repository = name if name in OUTSIDE else f"docs/{name}"

    def bend(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        on_site = path if path in OUTSIDE else path.removeprefix("docs/")
        if files.get_file_from_path(on_site) is None:
            if not (ROOT / path).exists():
                return match.group()  # strict mode will say so
            return text
        return f"{image}[{text}]({posixpath.relpath(on_site, posixpath.dirname(name) or '.')}{anchor or ''})"

    return LINK.sub(bend, markdown)
