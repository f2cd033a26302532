"""What the four packages' modules depend on, read from their imports without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parent.parent
PACKAGES = ("devices", "edgekv", "exporters", "quant")
_USES = (ast.Import, ast.ImportFrom, ast.Constant, ast.Call)


def code_digest(modules: tuple[str, ...], root: Path = ROOT) -> str:
    """Of all files in the packages that these modules depend on: other modules, and data beside them."""
    lines = (f"{file.relative_to(root)} {sha256(file.read_bytes()).hexdigest()}\n" for file in files(modules, root))
    return sha256("".join(lines).encode()).hexdigest()


def files(modules: tuple[str, ...], root: Path = ROOT) -> list[Path]:
    """The files that these modules depend on.

    An import counts wherever it stands, and so does a module's name in a string: that is how children are started. A
    package's `__init__` that only collects names of its modules stands for those that are asked for, although Python
    runs the others too: what they define is not used.
    """
    found = Source(root).closure(modules)
    data = (file for package in {module.parent for module in found} for file in _data(package))
    return sorted({*found, *data})


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its file, and the nodes that say what it uses.

    Attributes:
        collects: it is an `__init__` that does nothing but import names.
        lazy: the modules of the names that it imports for type checkers, which `edgekv.machine.lazy` imports later.
    """

    file: Path
    collects: bool
    nodes: list[ast.AST]
    lazy: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Module:
        collects, nodes, lazy = _read(file.read_bytes())
        return cls(file, collects and file.name == "__init__.py", nodes, lazy)


class Source:
    """The modules of the four packages below a folder."""

    def __init__(self, root: Path) -> None:
        self._files = {
            ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
            for package in PACKAGES
            for file in (root / package).rglob("*.py")
        }
        self._parsed: dict[str, Module] = {}

    def closure(self, names: tuple[str, ...]) -> list[Path]:
        """The files of these modules, of all that they import, and of the packages that Python runs before them."""
        used: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in used:
                used.add(name)
                waiting += self._packages(name)
                waiting += self._used(name)
        return [self._module(name).file for name in used]

    def _module(self, name: str) -> Module:
        if name not in self._parsed:
            self._parsed[name] = Module.read(self._files[name])
        return self._parsed[name]

    def _packages(self, module: str) -> Iterator[str]:
        """Those that a module lies in and that do more than collect names."""
        package, _, _ = module.rpartition(".")
        if package:
            yield from self._packages(package)
            if package in self._files and not self._module(package).collects:
                yield package

    def _used(self, module: str) -> Iterator[str]:
        """What a module uses: imported anywhere in it, or named in a string."""
        for node in self._module(module).nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self._files)
            elif isinstance(node, ast.ImportFrom) and node.module in self._files:
                yield from (home for alias in node.names for home in self._homes(node.module, alias.name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name, _, _ = node.value.partition(":")
                if "." in name and name in self._files:
                    yield name
            elif isinstance(node, ast.Call) and _imports_below(node):
                yield from (name for name in self._files if name.startswith(f"{module}."))

    def _homes(self, module: str, name: str) -> Iterator[str]:
        """The modules that a name comes from which is imported from a module."""
        if f"{module}.{name}" in self._files:
            yield f"{module}.{name}"
            return
        if self._module(module).file.name != "__init__.py":
            yield module
            return
        found = False
        for node in self._module(module).nodes:
            if isinstance(node, ast.ImportFrom) and node.module in self._files:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = True
                        yield from self._homes(node.module, alias.name)
        if (home := self._module(module).lazy.get(name)) in self._files:
            found = True
            yield from self._homes(home, name)
        if not found:
            yield module


@cache
def _read(source: bytes) -> tuple[bool, list[ast.AST], dict[str, str]]:
    """The fields of a `Module`; each source is read once."""
    statements = ast.parse(source).body
    checked = (each for statement in statements if _is_checked(statement) for each in statement.body)
    imports = (each for each in checked if isinstance(each, ast.ImportFrom))
    lazy = {alias.name: str(each.module) for each in imports for alias in each.names}
    nodes: list[ast.AST] = [node for node in _nodes(statements) if isinstance(node, _USES)]
    return all(map(_collects, statements)), nodes, lazy if b"= lazy(" in source else {}


def _is_checked(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _nodes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes, without blocks for type checkers and strings in dictionaries, which names are looked up in."""
    waiting = [*statements]
    while waiting:
        node = waiting.pop()
        yield node
        inside = node.orelse if _is_checked(node) else ast.iter_child_nodes(node)
        waiting += (each for each in inside if not (isinstance(node, ast.Dict) and isinstance(each, ast.Constant)))


def _collects(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets] == ["__all__"]
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return docstring or isinstance(statement, ast.Import | ast.ImportFrom)


def _imports_below(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("import_module") and isinstance(call.args[0], ast.JoinedStr)


def _data(folder: Path) -> Iterator[Path]:
    """Files of a package that are no modules, in it and in its folders that are no packages."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__" and not (path / "__init__.py").is_file():
            yield from _data(path)
        elif path.is_file() and path.suffix != ".py":
            yield path
