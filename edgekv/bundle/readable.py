"""JSON for people and programs."""

from __future__ import annotations

import msgspec


def readable_json(content: object, *, indent: int = 1) -> bytes:
    """Indented JSON in UTF-8: one field or element per line, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(content), indent=indent) + b"\n"
