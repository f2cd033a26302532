"""What `run_folder` asks of the child process that runs onnxruntime-genai, and what that answers."""

from __future__ import annotations

import msgspec


class GenaiJob(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy generation.

    Attributes:
        folder: what `write_folder` wrote.
        tokens: the prompt.
        max_new_tokens: most tokens to generate.
    """

    folder: str
    tokens: list[int]
    max_new_tokens: int


class GenaiReply(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens generated, or the text of the error that stopped it."""

    tokens: list[int] = []
    error: str | None = None
