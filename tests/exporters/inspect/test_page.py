"""The page of `eval --html`: complete in itself, with the figures of the text, and every name escaped."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.inspect.page import render_page
from exporters.inspect.page.charts import LineChart, Point, Series, treemap
from exporters.inspect.page.sizes import byte_shares
from exporters.inspect.report import LayersReport
from tests.support.checkpoints import NEWER, write_sinking
from tests.support.exports import export_options, exported

ODD = "text <b>&\"'\N{SNOWMAN}.txt"
VOID = {"meta", "circle", "line", "polyline", "rect"}


class Page(HTMLParser):
    """The elements of a page, checked for closing tags, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def sinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sinking(tmp_path_factory.mktemp("sinking"), NEWER)


@pytest.fixture(scope="module")
def bundle(sinking: Path) -> Path:
    return exported(sinking, export_options(context=64, ar=(1, 16), calibration_tokens=512))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / ODD
    path.write_text(" = Lists = \n A list is a sequence , and a tuple is one that cannot change . \n")
    return path


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_text_and_needs_nothing_else(bundle, text, tmp_path, capsys):
    file = tmp_path / "report.html"
    call = ["eval", str(bundle), "--text", str(text), "--tokens", "80", "--word-perplexity"]
    assert run([*call, "--html", str(file)]) == 0
    printed = capsys.readouterr().out
    page = Page(file.read_text("utf-8"))
    assert page.open == []
    assert page.seen.count("svg") >= 3
    assert page.links == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.seen)
    assert "http" not in file.read_text("utf-8")
    assert "url(" not in file.read_text("utf-8")
    numbers = re.findall(r"\d+\.\d+%?", printed)
    assert len(numbers) >= 12
    assert all(number in page.text for number in numbers)
    assert ODD in page.text, "the name of the text is shown as it is"
    assert "restored from the bundle" in page.text
    run([*call, "--layers", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert all(each["name"] in page.text for each in report["worst"])
    assert all(each["name"] in page.text for each in report["tensors"] if each["kind"] == "key")
    assert f"{report['evaluation']['words']['perplexity']:.4f}" in page.text
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.slow
def test_a_page_replaces_a_page_and_nothing_else(bundle, text, tmp_path, capsys):
    call = ["eval", str(bundle), "--text", str(text), "--tokens", "20", "--html"]
    other = tmp_path / "mine.html"
    other.write_text("<p>My own page.</p>")
    for name, wanted in (("mine.html", "a page of edgekv eval"), ("no/such.html", "folder"), ("report.txt", ".html")):
        assert run([*call, str(tmp_path / name)]) == 2
        assert wanted in capsys.readouterr().err
    assert other.read_text() == "<p>My own page.</p>"
    for _ in range(2):
        assert run([*call, str(tmp_path / "report.html")]) == 0


def test_odd_names_are_escaped(bundle, text, tmp_path, capsys):
    copy = Path(shutil.copytree(bundle, tmp_path / "<script>alert(1)<"))
    run(["eval", str(bundle), "--text", str(text), "--tokens", "40", "--layers", "--json"])
    report = json.loads(capsys.readouterr().out)
    del report["schema"]
    report["worst"][0]["suggestion"] = "</table><script>alert(2)</script>"
    found = Page(render_page(open_bundle(copy), _report(report)))
    assert found.open == []
    assert "script" not in found.seen
    assert "<script>alert(1)<" in found.text
    assert "</table><script>alert(2)</script>" in found.text


def _report(raw: dict[str, object]) -> LayersReport:
    return msgspec.convert(raw, LayersReport)


def test_every_byte_of_a_bundle_has_a_share(bundle):
    shares = byte_shares(open_bundle(bundle))
    assert sum(share.bytes for share in shares) == sum(
        path.stat().st_size for path in bundle.rglob("*") if path.is_file()
    )
    assert {"embedding", "lm_head", "q_proj", "down_proj", "scales", "sink.safetensors"} <= {s.name for s in shares}


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20))
def test_the_tiles_of_a_treemap_fill_it_in_proportion(amounts):
    tiles = treemap([(str(i), "other", amount) for i, amount in enumerate(amounts)], 960, 300)
    assert len(tiles) == len(amounts)
    for tile in tiles:
        wanted = 960 * 300 * tile.amount / sum(amounts)
        assert tile.width * tile.height == pytest.approx(wanted, rel=0.02, abs=10)
        assert tile.x + tile.width <= 960.1
        assert tile.y + tile.height <= 300.1


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(-100, 100)), min_size=1, max_size=20))
def test_points_of_a_chart_lie_within_its_axes(points):
    chart = LineChart.of([Series("a", [Point(x, y, "") for x, y in points]), Series("none", [])])
    assert len(chart.lines) == 1
    for dot in chart.lines[0].dots:
        assert chart.left <= dot.x <= chart.right
        assert chart.top <= dot.y <= chart.bottom
    assert 2 <= len(chart.y_ticks) <= 9
