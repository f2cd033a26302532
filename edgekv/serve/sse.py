"""Server-sent events, as the HTML standard defines them."""

from __future__ import annotations

import msgspec

WAITING = b": waiting\n\n"
"""A comment, which clients skip."""
DONE = b"data: [DONE]\n\n"
"""Ends a stream of completions."""

_encode = msgspec.json.Encoder().encode


def event(record: msgspec.Struct, name: str | None = None) -> bytes:
    """An event whose data is a record as JSON, which has no line break outside of its texts' escapes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + _encode(record) + b"\n\n"
