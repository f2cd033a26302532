"""The text that every Python installation has: the standard library's sources and its help topics."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = (
    "bisect.py",
    "colorsys.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/encoder.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)
"""Modules never trained on: their text measures perplexity."""

_SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",  # tables of code points
    "pydoc_data",  # read as text below, not as a dict literal
}


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def training_documents() -> Iterator[str]:
    """Every source file that is not held out, in path order, then every help topic."""
    root = _library()
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        generated = where.name.startswith("_sysconfigdata") or where.parts[0].startswith("config-")
        if _SKIPPED_FOLDERS & set(where.parts) or generated or where.as_posix() in HELD_OUT:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text
    yield from _help_topics(root)


def _help_topics(root: Path) -> Iterator[str]:
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text("utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    yield from (text for _, text in sorted(ast.literal_eval(table).items()))


def held_out_documents() -> Iterator[str]:
    """The held-out modules, whole, in name order."""
    for name in HELD_OUT:
        yield (_library() / name).read_text("utf-8")
