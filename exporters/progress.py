"""How long work tells what it is doing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of every stage and of the steps within it."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` steps of `stage` are finished."""


def silent(stage: str, done: int, total: int) -> None:
    """For callers that do not want to know."""
