"""JSON that people read as well."""

from __future__ import annotations

import msgspec


def readable_json(content: object, *, indent: int = 1) -> bytes:
    """JSON in UTF-8, a line for each field or element, and a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(content), indent=indent) + b"\n"
