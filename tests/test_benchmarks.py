"""Measurements: the pages name those that there are, they stand alone, and contenders take fair turns."""

import ast
import re

from benchmarks.turns import by_turns, turns_table
from tests.pages import PAGES, ROOT

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
