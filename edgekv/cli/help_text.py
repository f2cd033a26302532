"""The help of a command, read from its source: importing all commands for a list of them would take a second."""

from __future__ import annotations

import ast
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def help_of(point: metadata.EntryPoint) -> str | None:
    """The docstring of a function, or the argument `help` of a group; None if the source does not say it.

    Nothing is imported.
    """
    try:
        tree = ast.parse(_source(point.module).read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == point.attr:
            return ast.get_docstring(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _assigns(node, point.attr):
            texts = [ast.literal_eval(each.value) for each in node.value.keywords if each.arg == "help"]
            return texts[0] if texts else None
    return None


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _source(module: str) -> Path:
    """The file of a module, found from its outermost package: finding a submodule would import its parents.

    Raises:
        FileNotFoundError: not a module that lies in a folder.
    """
    outermost, *inner = module.split(".")
    spec = find_spec(outermost)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(module)
    if not inner:
        return Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*inner)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
