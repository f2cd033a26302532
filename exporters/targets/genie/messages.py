"""The messages between `GenieDialog` and the child process that runs libGenie.so: one JSON object a line."""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Create(_Message, frozen=True, kw_only=True):
    """Load a configuration; `folder` becomes the working directory, against which its paths are resolved."""

    library: str
    folder: str
    config: str


class Query(_Message, frozen=True, kw_only=True):
    """Continue a text."""

    text: str
    max_new_tokens: int | None = None


class TokenQuery(_Message, frozen=True, kw_only=True):
    """Continue tokens."""

    tokens: list[int]
    max_new_tokens: int | None = None


class Save(_Message, frozen=True, kw_only=True):
    path: str


class Restore(_Message, frozen=True, kw_only=True):
    path: str


class Reset(_Message, frozen=True, kw_only=True):
    pass


class ApplyLora(_Message, frozen=True, kw_only=True):
    """Let the graphs read an adapter of the configuration."""

    name: str


class Text(_Message, frozen=True, kw_only=True):
    """A piece of an answer."""

    piece: str


class Tokens(_Message, frozen=True, kw_only=True):
    """Some tokens of an answer."""

    tokens: list[int]


class Done(_Message, frozen=True, kw_only=True):
    """The request is finished, with Genie's status; `call` is the function that returned it."""

    call: str
    status: int


Request = Create | Query | TokenQuery | Save | Restore | Reset | ApplyLora
Reply = Text | Tokens | Done
