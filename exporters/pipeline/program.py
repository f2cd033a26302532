"""A hash of the program, which every piece reads."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # since Python 3.11


@cache
def program_sha256() -> str:
    """A hash of edgekv's source files, and of numpy's version."""
    digest = hashlib.sha256(np.__version__.encode())
    for package in ("quant", "devices", "edgekv", "exporters"):
        for name, content in _sources(resources.files(package)):
            digest.update(f"{package}/{name}\0".encode() + content)
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            found += _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
