"""Server-sent events, as the HTML standard defines them."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
"""Ends a stream of completions."""


def event(data: bytes, name: str | None = None) -> bytes:
    """An event; the data is JSON, which has no line break outside of its texts' escapes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + data + b"\n\n"
