"""Packages whose names are imported when they are asked for.

A command that only shows its help should not wait for numpy and the runtime.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package: the names that it imports for type checkers.

    They stand in one block, `if TYPE_CHECKING:`, as `from MODULE import NAME as NAME`. No name may be that of one of
    the package's modules, which would hide it once it is imported.
    """
    blocks = (node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert not homes.keys() & {home.removeprefix(f"{package}.") for home in homes.values()}

    def find(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, sorted(homes)
