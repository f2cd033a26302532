"""The documentation as a site: it builds without a warning, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.drawings.concepts import ALL
from docs.drawings.svg import Drawing
from tests.pages import PAGES, ROOT, name_of

LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)|src(?:set)?=\"([^\"]+)\"")
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)
LIMIT, README_LIMIT = 20_000, 900
"""Words of all pages outside of reference and notebook, and of README."""


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """Every page is in the navigation, every link and anchor exists, and generated pages have their contents."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert "edgekv bundle genie" in commands and "--recipe" in commands
    assert "query_gain" in (tmp_path / "reference" / "decoder-spec.html").read_text()
    assert "max_new_tokens" in (tmp_path / "reference" / "python.html").read_text()
    assert not [*missing_anchors(tmp_path)]


def missing_anchors(site: Path) -> Iterator[str]:
    """Links to a part of a page that the page does not have."""
    texts = {page: page.read_text("utf-8") for page in site.rglob("*.html")}
    names = {page: {*re.findall(r'id="([^"]+)"', text)} for page, text in texts.items()}
    for page, text in texts.items():
        for link, name in re.findall(r'href="([^":#]*)#([^"]+)"', text):
            target = (page.parent / link).resolve() if link else page
            if name not in names.get(target, {name}) and not name.startswith("__"):
                yield f"{page.relative_to(site)}: {link}#{name}"


def test_files_that_the_readme_links_to_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = {link or image for link, _, image in LINK.findall(text) if not (link or image).startswith("http")}
    assert targets and not [each for each in sorted(targets) if not (ROOT / each).exists()]


def test_guides_are_short() -> None:
    """Words of tables count, those of code do not; reference and notebook are apart."""
    pages = [page for page in PAGES if not name_of(page).startswith(("reference/", "notebook/"))]
    texts = {name_of(page): CODE.sub("", page.read_text("utf-8")) for page in pages}
    words = {name: sum(any(map(str.isalnum, word)) for word in text.split()) for name, text in texts.items()}
    assert sum(words.values()) <= LIMIT, words
    assert words["README.md"] <= README_LIMIT


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: str(draw.__name__))
def test_pictures_are_those_that_the_scripts_draw(draw: Callable[[], Drawing]) -> None:
    file = ROOT / "docs" / "images" / f"{draw.__name__.replace('_', '-')}.svg"
    assert file.read_text("utf-8") == str(draw())
    ElementTree.fromstring(file.read_text("utf-8"))
    assert any(file.name in page.read_text("utf-8") for page in PAGES)
