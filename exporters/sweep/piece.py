"""Pieces of a sweep: work with a key that follows from all it depends on, so that equal work is done once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from exporters.sweep.store import PieceStore


def hashed(*content: object) -> str:
    """The key of what depends on this, in hexadecimal."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]


class Work(Protocol):
    """What a piece does; it is sent to a worker, so it holds options and keys, never weights."""

    def __call__(self, folder: Path, store: PieceStore) -> object:
        """Write files into a folder, and return what was found, for JSON."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a sweep.

    Attributes:
        kind: of the work: `survey`, `layer`, `run`, `matrix`, `write`, `check`, `compile`, `reference`, `evaluate` or
            `error`.
        key: hash of all that the result depends on.
        needs: keys of the pieces that must be finished before.
        ram_bytes: estimate of the RAM that it takes.
        work: what it does.
    """

    kind: str
    key: str
    needs: tuple[str, ...]
    ram_bytes: int
    work: Work


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of a sweep by key, each after those that it needs."""

    pieces: dict[str, Piece]

    def under(self, keys: Sequence[str]) -> set[str]:
        """These keys, and those of all pieces below them."""
        found, waiting = set[str](), [*keys]
        while waiting:
            key = waiting.pop()
            if key not in found:
                found.add(key)
                waiting += self.pieces[key].needs
        return found
