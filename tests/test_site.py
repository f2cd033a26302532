"""The documentation as a site: it builds without a warning, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import PAGES, ROOT, name_of

LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)|src(?:set)?=\"([^\"]+)\"")
LIMIT = 36_000
"""Words outside of reference and notebook."""


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


def test_files_that_the_readme_links_to_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = {link or image for link, _, image in LINK.findall(text) if not (link or image).startswith("http")}
    assert targets and not [each for each in sorted(targets) if not (ROOT / each).exists()]


def test_guides_are_short() -> None:
    pages = [page for page in PAGES if not name_of(page).startswith(("reference/", "notebook/"))]
    words = {name_of(page): len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= LIMIT, words
