"""The version of a manifest's layout, its seal, and the formats of graphs."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

FORMAT = 9
SEAL = "seal"
HEADS_FILE = "heads.safetensors"
"""What an export has folded into queries, keys and values."""

GraphFormat = Literal["onnx", "tflite"]
"""Format of the graphs."""

Content = dict[str, Any]
"""A manifest as plain JSON."""


def seal_of(content: Content) -> str:
    """The SHA-256, in hexadecimal, of a manifest without its seal: as JSON in ASCII, sorted keys, no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
