"""Imports run down: no package imports one above it, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from edgekv.cli.commands import find_commands

ROOT = Path(__file__).parent.parent
PACKAGES = ("quant", "devices", "edgekv", "exporters")
FLOORS = (
    ("quant", "devices", "edgekv.errors"),
    ("edgekv.machine",),
    ("edgekv.option",),
    ("edgekv.qnn", "edgekv.paged"),
    ("edgekv.spec",),
    ("edgekv.kv", "edgekv.bundle"),
    ("edgekv.graphs",),
    ("edgekv.runtime",),
    ("edgekv.prefix", "edgekv.draft"),
    ("edgekv.pictures",),
    ("edgekv.text",),
    ("edgekv.engine",),
    ("edgekv.embed",),
    ("edgekv.model", "edgekv.plan", "edgekv.doctor"),
    ("edgekv.loading",),
    ("edgekv.conversation", "edgekv.bench", "edgekv.conformance"),
    ("edgekv.cli",),
    ("edgekv.serve", "edgekv.__main__"),
    ("exporters",),
    ("exporters.capabilities", "exporters.checkpoint", "exporters.htp", "exporters.progress"),
    ("exporters.quantize",),
    ("exporters.graphs", "exporters.lora", "exporters.resources"),
    ("exporters.inspect", "exporters.options"),
    ("exporters.preconditions",),
    ("exporters.drafter", "exporters.plan"),
    ("exporters.pipeline",),
    ("exporters.estimate",),
    ("exporters.allocate", "exporters.compile"),
    ("exporters.export",),
    ("exporters.cli",),
    ("exporters.sweep", "exporters.targets"),
    ("exporters.compare", "exporters.conformance"),
)


@cache
def _imports() -> dict[str, set[str]]:
    """The modules that each module imports; not of edgekv itself, which imports what it names when it is asked."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    del modules["edgekv"]
    return {name: {*_imported(_parsed(file))} & modules.keys() for name, file in modules.items()}


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("edgekv", "exporters") else parts[0]


def test_no_package_imports_one_above_it():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    wrong = [
        f"{module} imports {imported}"
        for module, found in _imports().items()
        for imported in found
        if _room(imported) != _room(module) and floor_of[_room(imported)] >= floor_of[_room(module)]
    ]
    assert not wrong and len(_imports()) > 300


def test_no_modules_import_each_other():
    assert {*TopologicalSorter(_imports()).static_order()} == {*_imports()}


def test_the_reference_operator_is_not_imported_at_run_time():
    """Of the product, only the package itself imports `edgekv.paged`."""
    users = {name for name, found in _imports().items() if any(_room(each) == "edgekv.paged" for each in found)}
    assert {_room(name) for name in users} == {"edgekv.paged"}


@pytest.mark.parametrize(
    ("worker", "unused"),
    [
        ("edgekv.qnn.worker", ["edgekv.kv", "edgekv.runtime", "onnx"]),
        ("exporters.targets.genie.worker", ["edgekv.spec", "numpy", "onnxruntime"]),
        ("exporters.targets.genai.worker", ["edgekv.spec", "numpy", "onnxruntime"]),
        ("exporters.targets.probes", ["onnx_ir", "qai_hub"]),
    ],
)
def test_children_do_not_import_what_they_do_not_use(worker: str, unused: list[str]):
    """An export starts one for each graph, and most of their time would be imports."""
    program = f"import sys, {worker}; print(*sys.modules.keys() & {set(unused)})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_does_not_wait_for_numpy():
    program = """import sys
from edgekv.cli import run
for name in sys.argv[1:]:
    code, slow = run([name, "--help"]), sys.modules.keys() & {"numpy", "onnx", "onnx_ir", "onnxruntime"}
    if code or slow:
        sys.exit(f"{name}: exit code {code}, imports {slow}")
"""
    commands = [*find_commands()]
    done = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("Usage: ") == len(commands) > 20


@pytest.mark.parametrize(
    "package",
    [
        "edgekv",
        "edgekv.bench",
        "edgekv.bundle",
        "edgekv.draft",
        "edgekv.plan",
        "edgekv.prefix",
        "edgekv.serve",
        "edgekv.spec",
        "edgekv.text",
        "exporters.checkpoint.lora",
        "exporters.compare",
    ],
)
def test_a_package_has_the_names_that_it_lists(package: str):
    found = import_module(package)
    assert all(hasattr(found, name) for name in found.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = found.missing


def test_exported_names_are_written_once():
    """A package imports them as themselves, which type checkers read; a list of the same names would be a second."""
    lists = [
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in _parsed(file).body
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("__all__ = [")
    ]
    assert lists == []


def test_no_function_but_the_reference_operator_has_more_than_eight_parameters():
    """By position; options that callers name, and those of commands, are read one by one."""
    most, found = 8, set[str]()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(_parsed(file)):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                is_command = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
                if len(names) - (names[:1] in (["self"], ["cls"])) > most and not is_command:
                    found.add(node.name)
    assert found == {"paged_attention"}


def test_variables_are_named_after_their_things():
    """`each` row is a row, what was `found` is a number, what is `wanted` is a limit; a limit is `min_` or `max_`."""
    says_nothing = re.compile(r"each|found|given|wanted|_*(most|least)_(?!common$|likely$).*", re.IGNORECASE)
    files = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(_parsed(file))
        if (isinstance(node, ast.Name) and says_nothing.fullmatch(node.id))
        or (isinstance(node, ast.arg) and says_nothing.fullmatch(node.arg))
    }
    assert not files, f"name the variables of {', '.join(sorted(files))} after what they hold"


def test_tests_lie_as_the_packages_do() -> None:
    """The tests of a room lie in the folder of its name; those of the whole repository, at the top."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 30
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    assert not [*(ROOT / "tests" / "support").rglob("test_*.py")]
