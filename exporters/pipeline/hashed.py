"""Names of what depends on its content alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec


def hashed(*content: object) -> str:
    """The name of what depends on this, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(content, enc_hook=_encoded, order="sorted")).hexdigest()[:32]


def _encoded(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, range):
        return value.start, value.stop, value.step
    raise TypeError(f"piece: got a {type(value).__name__}; expected values that have one form in JSON")
