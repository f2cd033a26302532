"""Packages whose names are imported when they are asked for.

A command that only shows its help should not wait for numpy and the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. No name may be that of one of its modules, which hides it once it is imported.

    Args:
        package: its name.
        names: the names of each module, with spaces between, by the module's name within the package.
    """
    assert not {name for listed in names.values() for name in listed.split()} & names.keys()
    homes = {name: f"{package}.{module}" for module, listed in names.items() for name in listed.split()}

    def find(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
