"""Language models on mobile NPUs, with a KV cache that does not copy."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.model import Model, load

__all__ = ["Model", "load"]

# ONNX Runtime and onnxruntime-genai write files and upload events unless this is set before they are loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("ORT_GENAI_TELEMETRY_DISABLED", "1")


def __getattr__(name: str) -> Any:
    # The runtime takes a while to import; commands that need none should not wait for it.
    if name in __all__:
        return getattr(import_module("edgekv.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
