"""How many changes of a package its tests notice: python -m benchmarks.mutations edgekv/engine --changes 60 --seed 0

Each change is of one operator, constant, condition or statement, drawn at random. The tests that lie as the package
does run once to learn which functions each of them calls; a change is then tried on those that call the function that
it is in, fastest first. It is made while the module is imported: files, and shared exports that are named by their
hash, stay as they are, and child processes see no change. Tests that are `slow`, `thorough` or `htp` are left out. What
other packages' tests notice too: `--tests tests/edgekv/engine tests/edgekv/draft tests/edgekv/pictures`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SELECT = "not htp and not slow and not thorough and not numpy2"
LONGEST_S = 300
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
Function = tuple[str, int]
"""A file below the root and the first line of a function; 0 for what runs when the module is imported."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a change can be made.

    Attributes:
        file: below the root.
        index: of the node, in the order of `ast.walk`.
        line: of the node.
        function: that it is in.
        what: the change.
    """

    file: str
    index: int
    line: int
    function: Function
    what: str


def change(node: ast.AST) -> str | None:
    """Change a node in place, and say how; None if nothing in it is changed."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            node.op = SWAPPED[type(op)]()  # type: ignore[assignment]
            return f"{type(op).__name__} to {type(node.op).__name__}"
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPPED:
            node.ops = [SWAPPED[type(op)](), *rest]  # type: ignore[list-item]
            return f"{type(op).__name__} to {type(node.ops[0]).__name__}"
        case ast.Constant(value=bool(value)):
            node.value = not value
            return f"{value} to {not value}"
        case ast.Constant(value=int(value)):
            node.value = value + 1
            return f"{value} to {value + 1}"
        case ast.UnaryOp(op=ast.Not()):
            node.op = ast.UAdd()
            node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
            return "not removed"
        case ast.Call(func=ast.Name(id=name) as called) if name in NAMES:
            called.id = NAMES[name]
            return f"{name} to {NAMES[name]}"
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            node.test = ast.UnaryOp(ast.Not(), test)
            return "condition negated"
        case ast.Expr(value=ast.Call()):
            node.value = ast.Constant(None)
            return "call removed"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            node.value = ast.Constant(None)
            return "None returned"
    return None


def sites(file: Path) -> Iterator[Site]:
    """Every place of a file where a change can be made: not in annotations, raised errors, or checks of types."""
    tree = ast.parse(file.read_text("utf-8"))
    name = file.relative_to(ROOT).as_posix()
    spared: set[ast.AST] = set()
    functions: dict[ast.AST, Function] = {}
    for node in ast.walk(tree):
        apart = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise | ast.Assert) or ast.unparse(getattr(node, "test", node)) == "TYPE_CHECKING":
            apart.append(node)
        spared |= {inner for each in apart if each for inner in ast.walk(each)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            body = node.body if isinstance(node.body, list) else [node.body]
            functions |= {inner: (name, first) for part in body for inner in ast.walk(part)}
    for index, node in enumerate(ast.walk(tree)):
        if node not in spared and (what := change(copy.deepcopy(node))):
            yield Site(name, index, getattr(node, "lineno", 0), functions.get(node, (name, 0)), what)


class Changed(importlib.machinery.SourceFileLoader):
    """Loads a module with a change."""

    def __init__(self, name: str, path: str, site: Site) -> None:
        super().__init__(name, path)
        self._site = site

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text("utf-8"))
        node = next(node for index, node in enumerate(ast.walk(tree)) if index == self._site.index)
        change(node)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


@dataclass
class Finder:
    """Finds the one module that is changed."""

    site: Site

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        file = self.site.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if name != file:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = Changed(name, spec.origin, self.site)
        return spec


@dataclass
class Watch:
    """A plugin of pytest: the functions of a package that each test calls, and what each test took.

    What is called while tests are collected counts for all of them; what a shared fixture calls, for its first test.
    """

    package: str
    called: dict[str, set[Function]] = field(default_factory=lambda: defaultdict(set))
    taken_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: list[str] = field(default_factory=list)
    _seen: set[CodeType] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with self._watched(""):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        with self._watched(item.nodeid):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.taken_s[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        self._seen = set()
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            at = len(str(ROOT)) + 1
            self.called[name] = {(code.co_filename[at:], code.co_firstlineno) for code in self._seen}

    def _observe(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in self._seen and frame.f_code.co_filename.startswith(self.package):
            self._seen.add(frame.f_code)


def run(arguments: Sequence[str], *plugins: object) -> int:
    """Run pytest in this process, silently."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-m", SELECT, *arguments], [*plugins]))


def try_change(site: Site, tests: Sequence[str]) -> None:
    """Exit with pytest's status."""
    sys.meta_path.insert(0, Finder(site))
    os._exit(run(tests))


def collect(tests: Sequence[str]) -> None:
    """Exit with pytest's status of finding the tests, without a change."""
    os._exit(run(["--collect-only", *tests]))


def learn(package: str, tests: Sequence[str], answer: Any) -> None:
    """Send the functions that each test calls, and the tests from fast to slow."""
    watch = Watch(str(ROOT / package))
    code = run(tests, watch)
    answer.send((code, dict(watch.called), sorted(watch.taken_s, key=lambda name: watch.taken_s[name]), watch.failed))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="a folder, such as quant or edgekv/kv")
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=[], help="folders or files instead of the package's own")
    given = parser.parse_args()
    os.chdir(ROOT)
    tests = given.tests or [f"tests/{given.package}"]
    everywhere = [site for file in sorted((ROOT / given.package).rglob("*.py")) for site in sites(file)]
    chosen = random.Random(given.seed).sample(everywhere, min(given.changes, len(everywhere)))
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    learner = fork.Process(target=learn, args=(given.package, tests, sender))
    learner.start()
    code, called, fastest, failed = receiver.recv()
    learner.join()
    if code:
        sys.exit(f"{', '.join(tests)}: exit status {code} without a change; {failed}")
    print(f"{given.package}: {len(everywhere):,} changes are possible, {len(fastest)} tests", flush=True)
    noticed = 0
    for number, site in enumerate(chosen, 1):
        for_all = not site.function[1] or site.function in called[""]
        callers = [name for name in fastest if for_all or site.function in called[name]]
        began, status = time.monotonic(), 0
        if callers:
            child = fork.Process(target=try_change, args=(site, callers))
            child.start()
            child.join(LONGEST_S)
            status = 1 if child.exitcode is None else child.exitcode  # one that hangs is noticed
            child.kill()
            child.join()
            if status == pytest.ExitCode.USAGE_ERROR:  # a module of tests that the change keeps from being imported
                unchanged = fork.Process(target=collect, args=(callers,))
                unchanged.start()
                unchanged.join()
                if unchanged.exitcode:
                    sys.exit(f"pytest did not find one of {callers}")
        noticed += status != 0
        taken_s = time.monotonic() - began
        said = f"noticed in {taken_s:.0f} s" if status else f"NOT NOTICED by {len(callers)} tests"
        said = f"no end in {LONGEST_S} s, which counts as noticed" if taken_s >= LONGEST_S else said
        print(f"{number:3} {site.file}:{site.line}: {site.what}: {said}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed: {100 * noticed / len(chosen):.0f} %")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # what a changed program exports is nobody else's
        kept = Path(os.environ.get("EDGEKV_TEST_CACHE") or ROOT / "build" / "test-cache")
        with suppress(FileNotFoundError):
            shutil.copytree(kept, Path(folder, "cache"), copy_function=os.link, ignore=shutil.ignore_patterns("*.lock"))
        os.environ["EDGEKV_TEST_CACHE"] = str(Path(folder, "cache"))
        import onnxruntime  # noqa: F401  # before the forks, which need not import it each time

        main()
