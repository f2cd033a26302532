"""Language models on mobile NPUs, with a KV cache that does not copy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.model import Model, load

__all__ = ["Model", "load"]


def __getattr__(name: str) -> Any:
    # The runtime takes a while to import; commands that need none should not wait for it.
    if name in __all__:
        return getattr(import_module("edgekv.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
