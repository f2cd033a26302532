"""The versions of a manifest's layout, its seal, and how older versions are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

FORMAT = 3
SEAL = "seal"

Content = dict[str, Any]
"""A manifest as plain JSON."""


def upgraded(content: Content, version: int) -> Content:
    """A manifest of an older version in the layout of `FORMAT`.

    Args:
        content: without its seal.
        version: one of `UPGRADES`, or `FORMAT`.

    Raises:
        KeyError: a field of its version is missing.
        TypeError: a field has another type.
        AttributeError: likewise.
    """
    while version < FORMAT:
        content = UPGRADES[version](content)
        version += 1
    return content | {"format": FORMAT}


def seal_of(content: Content) -> str:
    """The SHA-256, in hexadecimal, of a manifest without its seal: as JSON in ASCII, sorted keys, no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _divide_graphs(content: Content) -> Content:
    """Version 1 had one file for each graph; version 2 lists the parts of a graph."""
    layers = content["model"]["layers"]
    graphs = []
    for graph in content["graphs"]:
        whole = {"name": graph["name"], "file": graph["file"], "first_layer": 0, "stop_layer": layers}
        rest = {name: value for name, value in graph.items() if name != "file"}
        graphs.append(rest | {"parts": [whole | {"embeds": True, "head": True}]})
    return content | {"graphs": graphs}


def _unchanged(content: Content) -> Content:
    """Version 3 adds the seal."""
    return content


UPGRADES: dict[int, Callable[[Content], Content]] = {1: _divide_graphs, 2: _unchanged}
"""For each older version, the function that converts it to the next."""
