"""The hash of a part of the program changes with all that the part imports, and with nothing else."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from edgekv.machine.program import program_sources
from exporters.pipeline.dask.fitness import _MAKERS
from tests.test_imports import PACKAGES, ROOT, _imports

GRAPHS, PIECES = "edgekv.graphs.graph_cache", "exporters.pipeline.pieces"


@cache
def _imported(source: bytes) -> set[tuple[str, str]]:
    """Modules and names that a module imports anywhere, unless it is for type checkers."""
    waiting, found = list[ast.AST]([ast.parse(source)]), set[tuple[str, str]]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, alias.name) for alias in node.names)
        is_checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += [] if is_checked else ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("module", [GRAPHS, PIECES, "exporters.htp.check", "edgekv.cli"])
def test_the_sources_are_those_of_all_imports(module: str) -> None:
    """Also of names that a lazy package imports when they are asked for."""
    found = program_sources(module)
    for source in (content for _, content in found.values()):
        for home, name in _imported(source):
            if home.split(".")[0] not in PACKAGES:
                continue
            value = getattr(import_module(home), name)
            named = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", home)
            for each in {home, named}:
                assert each in found or each.split(".")[0] not in PACKAGES or each == "edgekv", f"{home}: {name}"


def test_what_is_loaded_to_build_graphs_is_part_of_their_key() -> None:
    call = "import sys, edgekv.graphs.build, edgekv.graphs.packed_weights; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.split(".")[0] in PACKAGES} & _imports().keys()
    assert len(ours) > 50 and ours <= program_sources(GRAPHS).keys()


def test_every_piece_is_known_to_workers() -> None:
    known = program_sources(*_MAKERS)

    files = [(name, ROOT.joinpath(*name.split(".")).with_suffix(".py")) for name in _imports()]
    makers = {name for name, file in files if file.is_file() and "(Piece):" in file.read_text()}
    assert len(makers) > 6 and makers <= known.keys()
    assert "edgekv.spec.families.qwen3_5" in known  # which its package finds by its name
    assert "edgekv.qnn.worker" in known  # which a child process runs
    assert not [name for name in program_sources(PIECES) if name.startswith(("edgekv.serve", "edgekv.cli"))]


@pytest.fixture
def hash_of(tmp_path: Path) -> Callable[[], list[str]]:
    """The hashes of graphs and of pieces, of a copy of the program in `program`."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "program" / package, ignore=shutil.ignore_patterns("__pycache__"))
    call = f"from edgekv.machine.program import program_sha256 as f; print(f({GRAPHS!r}), f({PIECES!r}))"

    def found() -> list[str]:
        environment = {**os.environ, "PYTHONPATH": "program", "EDGEKV_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", call], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    return found


def test_a_change_empties_what_it_may_change(tmp_path: Path, hash_of: Callable[[], list[str]]) -> None:
    before = hash_of()
    assert hash_of() == before and [*(tmp_path / "cache").rglob("program/*.json")]
    for name, changes in (
        ("quant/grids.py", [True, True]),
        ("edgekv/bundle/weights.py", [True, True]),
        ("edgekv/graphs/products.py", [True, True]),
        ("exporters/quantize/matrices.py", [False, True]),
        ("edgekv/serve/chat.py", [False, False]),
        ("edgekv/cli/chat.py", [False, False]),
    ):
        with (tmp_path / "program" / name).open("a") as file:
            file.write("# another line\n")
        after = hash_of()
        assert [one != other for one, other in zip(before, after, strict=True)] == changes, name
        before = after
    (tmp_path / "program/edgekv/spec/families/new.py").write_text("")
    assert hash_of()[1] != before[1]


@pytest.mark.parametrize(
    ("added", "is_followed"),
    [
        ("def late():\n    from edgekv import Conversation\n", True),
        ("def late():\n    from edgekv.serve import ModelServer\n", True),
        ("import edgekv\n\nuse = edgekv.serve\n", True),
        ('CHILD = "edgekv.serve.chat:run"\n', True),
        ("if TYPE_CHECKING:\n    from edgekv.serve.chat import ChatRequest\n", False),
        ("from edgekv.bundle import Manifest\n", False),
    ],
)
def test_names_are_followed_to_their_modules(
    tmp_path: Path, hash_of: Callable[[], list[str]], added: str, is_followed: bool
) -> None:
    with (tmp_path / "program" / PIECES.replace(".", "/")).with_suffix(".py").open("a") as file:
        file.write(added)
    before = hash_of()
    for name in ("edgekv/conversation.py", "edgekv/serve/chat.py"):
        with (tmp_path / "program" / name).open("a") as file:
            file.write("# another line\n")
    assert (hash_of()[1] != before[1]) == is_followed
