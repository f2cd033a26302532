"""`edgekv serve`: OpenAI's API on a bundle."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.serve.options import Limits, ServeOptions
    from edgekv.serve.serving import Serving

__all__ = ["Limits", "ServeOptions", "Serving"]

_HOMES = {
    "Limits": "edgekv.serve.options",
    "ServeOptions": "edgekv.serve.options",
    "Serving": "edgekv.serve.serving",
}


def __getattr__(name: str) -> Any:
    # `edgekv --help` imports the command, and must not wait for the runtime or need the extra.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
