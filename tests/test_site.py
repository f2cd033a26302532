"""The documentation as a site: it builds without a warning, and links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs
from playwright.sync_api import Browser

import edgekv
from docs.drawings.concepts import ALL
from docs.drawings.svg import Drawing
from docs.results import FILE, MARKED, PAGES as PAGES_OF_RESULTS, TABLES, read, rendered, with_quality, write
from edgekv.cli import run
from tests.support.pages import PAGES, ROOT, name_of
from tests.support.serving import new_tab

LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)|src(?:set)?=\"([^\"]+)\"")
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)
LIMIT, README_LIMIT = 21_504, 900
"""Words of all pages outside of reference, results and notebook, and of README."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, which builds without a warning: every page is in the navigation, every link leads somewhere."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds(site: Path) -> None:
    """Every anchor exists, and generated pages have their contents."""
    commands = (site / "reference" / "commands.html").read_text()
    assert "edgekv bundle genie" in commands and "--recipe" in commands
    assert "query_gain" in (site / "reference" / "decoder-spec.html").read_text()
    assert "max_new_tokens" in (site / "reference" / "python.html").read_text()
    assert not [*missing_anchors(site)]


@pytest.mark.slow
def test_the_copy_button_takes_commands_alone_and_lines_are_whole(site: Path, chromium: Browser) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, new_tab(chromium) as tab:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for width in (1366, 390):
            tab.resize(width, 800)
            tab.open(f"http://127.0.0.1:{server.server_port}/start/chat.html")
            tab.wait("document.querySelector('.md-clipboard, [data-clipboard-target]') !== null")
            tab.run("document.querySelector('[data-clipboard-target]').click(), undefined")
            tab.wait("navigator.clipboard.readText().then(text => text !== '')")
            assert tab.clipboard() == "edgekv chat build/smollm2"
            cut = "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth).length"
            assert tab.run(cut) == 0
        server.shutdown()


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
    """Words of tables count, those of code do not; reference, results and notebook are apart."""
    pages = [page for page in PAGES if not name_of(page).startswith(("reference/", "notebook/", "results"))]
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


@pytest.mark.parametrize("page", PAGES_OF_RESULTS, ids=lambda page: page.stem)
def test_figures_are_those_of_the_file_of_results(page: Path) -> None:
    text = page.read_text("utf-8")
    assert rendered(text, read()) == text, "run python -m docs.results"


def test_every_figure_of_the_file_of_results_is_stated() -> None:
    results, named = read(), [{found[1] for found in MARKED.findall(page.read_text())} for page in PAGES_OF_RESULTS]
    assert named[0] | named[1] == results.facts.keys() | TABLES.keys()
    assert named[0] & named[1] == results.facts.keys(), "both pages state them"
    changed = structs.replace(results, facts=dict.fromkeys(results.facts, "another"))
    assert all(rendered(page.read_text(), changed).count("another<") >= 6 for page in PAGES_OF_RESULTS)


def test_the_file_of_results_is_as_commands_write_it(tmp_path: Path) -> None:
    write(read(), tmp_path / "results.json", pages=())
    assert (tmp_path / "results.json").read_bytes() == FILE.read_bytes(), "run python -m docs.results"


def test_a_row_takes_what_eval_and_compare_measured(bundle: Path, embedded: Path, capfd: pytest.CaptureFixture) -> None:
    """And it keeps what they do not measure."""
    text = ["--text", str(embedded / "heldout.txt"), "--tokens", "60", "--json"]
    for command in (["eval", str(bundle), *text], ["compare", str(bundle), str(embedded), "--new-tokens", "0", *text]):
        capfd.readouterr()
        assert run(command) == 0
        measured = capfd.readouterr().out.encode()
        old, new = (each.row("lpbq64") for each in (read(), with_quality(read(), measured, "lpbq64")))
        found = json.loads(measured)
        assert float(new.kl) == pytest.approx(found["kl_nats"], abs=1e-4) and new.kl != old.kl
        assert float(new.top1) == pytest.approx(100 * found["top1_agreement"], abs=0.1)
        assert (new.label, new.mb, new.chat) == (old.label, old.mb, old.chat)
    with pytest.raises(KeyError, match=r"no row of docs/results\.json has the key another"):
        with_quality(read(), measured, "another")


def test_a_sweep_gives_the_rows_of_its_goals() -> None:
    lost = {"perplexity_ratio": 1.00123, "perplexity_ratio_error": 0.00045, "kl_nats": 0.00091, "top1_agreement": 0.981}
    other = {"recipe": "mine.json", "kv": "u8", "evaluation": lost}
    sweep = {"results": [{"recipe": "w8a16", "kv": "s16", "evaluation": lost}, other]}
    row = with_quality(read(), json.dumps(sweep).encode(), None).row("w8a16-s16")
    assert (row.perplexity, row.error, row.kl, row.top1) == ("1.00123", "0.00045", "0.0009", "98.1")
    with pytest.raises(KeyError, match="no goal for mine"):
        with_quality(read(), json.dumps({"results": [other]}).encode(), None)


def test_missed_goals_are_named() -> None:
    results = read()
    for name, goal in results.goals.items():
        row = results.row(goal.measured)
        missed = [
            float(row.perplexity) > float(goal.perplexity),
            float(row.kl) > float(goal.kl),
            float(row.top1) < float(goal.top1),
        ]
        assert (f"| {name.replace(':', ', ')} |" in (ROOT / "docs" / "results.md").read_text()) == any(missed), name


def test_paths_of_this_repository_exist() -> None:
    """Folders and files that a page names in full."""
    named = re.compile(r"`((?:docs|edgekv|exporters|tests|models|benchmarks|quant|devices)/[\w/.-]*)`")
    pages = [*PAGES, *ROOT.glob("*.md")]
    found = {(page.name, path) for page in pages for path in named.findall(page.read_text("utf-8"))}
    assert len(found) > 20 and not [each for each in sorted(found) if not (ROOT / each[1]).exists()]


def test_all_that_the_package_offers_is_on_the_page_of_python() -> None:
    listed = re.findall(r"^::: edgekv\.(\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.M)
    assert {*listed} == {*edgekv.__all__} - {"__version__"}


def test_all_files_of_a_bundle_are_on_its_page() -> None:
    """Names of files that the program has constants for."""
    page = (ROOT / "docs/reference/bundle.md").read_text()
    constants = re.compile(r'^_?[A-Z_]+ = "([a-z_]+\.(?:safetensors|json))"$', re.M)
    folders = ("edgekv/bundle", "edgekv/spec", "exporters/quantize/sink.py", "exporters/lora/base.py")
    sources = [path for each in folders for path in ((ROOT / each).rglob("*.py") if "." not in each else [ROOT / each])]
    names = {name for path in sources for name in constants.findall(path.read_text())}
    assert {"heads.safetensors", "chat_template.json", "lora.safetensors"} <= names
    kept_elsewhere = {"config.json", "hashes.json", "adapter.json", "adapter.safetensors"}
    assert not [name for name in sorted(names - kept_elsewhere) if f"`{name}`" not in page]
