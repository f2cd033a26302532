"""A piece of an export: work that is named after everything it reads, so that equal work is done once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edgekv.machine.program import program_sha256
from exporters.pipeline.hashed import hashed

if TYPE_CHECKING:
    from exporters.pipeline.inputs import Inputs
    from exporters.pipeline.store import PieceStore


class Piece(ABC):
    """A frozen dataclass whose fields are all that the work reads, besides the program.

    What a piece finds depends on its fields alone: files of the user are read through `Inputs`, which compares them
    with the hashes in the fields. So a name can hold nothing stale.

    Attributes:
        kind: of the work, for progress, the store and messages.
        in_child: whether a child process does the work, so that several run at a time in one process.
    """

    __slots__ = ()
    kind: ClassVar[str]
    in_child: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The hash of all fields and of the program, in hexadecimal."""
        program = [np.__version__, program_sha256(type(self).__module__)]  # an edit elsewhere leaves it as it is
        return hashed(self.kind, program, {attribute.name: getattr(self, attribute.name) for attribute in fields(self)})  # type: ignore[arg-type]

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of the pieces that it reads."""

    def unusable(self, store: PieceStore) -> str | None:
        """Name of a finished piece that left out what this one reads; None if there is none."""
        return None

    @abstractmethod
    def make(self, folder: Path, inputs: Inputs) -> object:
        """Write files into a folder, and return what was found, for JSON."""


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A piece and what its executor must know of it.

    Attributes:
        piece: the work.
        ram_bytes: estimate of the RAM that it takes, with its child processes.
    """

    piece: Piece
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Pieces by name, each after those that it needs.

    Attributes:
        pieces: the work.
        sources: what the command itself puts into the store: functions that write the files of a name.
        residual_every: of how many layers one stores its residual; see `Inputs`.
    """

    pieces: dict[str, PlannedPiece] = field(default_factory=dict)
    sources: dict[str, Callable[[Path], object]] = field(default_factory=dict)
    residual_every: int = 1

    def put(self, piece: Piece, ram_bytes: int) -> str:
        """Add a piece unless it is there; returns its name."""
        name = piece.name
        if name not in self.pieces:
            self.pieces[name] = PlannedPiece(piece, ram_bytes)
        return name

    def give(self, write: Callable[[Path], object], *content: object) -> str:
        """Add files that follow from this content; returns their name."""
        name = hashed("given", *content)
        self.sources.setdefault(name, write)
        return name

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """The pieces of these names, and all that they need."""
        ancestors, waiting = set[str](), [*names]
        while waiting:
            name = waiting.pop()
            if name not in ancestors and name in self.pieces:
                ancestors.add(name)
                waiting += self.pieces[name].piece.needs
        return ancestors

    def unfinished(self, store: PieceStore, targets: Iterable[str]) -> dict[str, PlannedPiece]:
        """The pieces to do for these targets: without what is finished, and without all that only it needs.

        A finished piece that left out what one of them reads is removed, and done again.
        """
        unfinished, waiting, known = set[str](), [*targets], set[str]()
        while waiting:
            name = waiting.pop()
            if name in known or name not in self.pieces:
                continue
            known.add(name)
            if store.find(name) is not None:
                continue
            unfinished.add(name)
            piece = self.pieces[name].piece
            waiting += piece.needs
            if (before := piece.unusable(store)) is not None:
                store.remove([before])
                known.discard(before)
        return {name: planned for name, planned in self.pieces.items() if name in unfinished}

    def kinds(self, names: Iterable[str]) -> Iterator[str]:
        """The kind of each of these pieces."""
        return (self.pieces[name].piece.kind for name in names)
