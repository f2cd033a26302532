"""`GET /`: a page to talk to the model."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from edgekv.serve.http import Exchange

_FILE = "chat.html"


@cache
def page() -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """The page, and headers that allow its own script and style, requests to this server, and nothing else.

    Trusted types keep the script itself from turning text into HTML.
    """
    text = files("edgekv.serve").joinpath(_FILE).read_text("utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"no-cache"),
    )
    return text.encode(), headers


async def chat_page(exchange: Exchange) -> None:
    """`GET /`.

    Raises:
        DisconnectedError: the client takes nothing.
    """
    data, headers = page()
    await exchange.send_bytes(data, b"text/html; charset=utf-8", headers=headers)


def _hash(text: str, tag: str) -> str:
    """The hash of an element's content, as a content security policy names it."""
    element = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)
    assert element is not None
    return f"'sha256-{b64encode(sha256(element[1].encode()).digest()).decode()}'"
