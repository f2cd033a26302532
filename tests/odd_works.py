"""Works of pieces that do not end, end their process, or hold memory; workers import them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from exporters.pipeline.dask.fitness import WorkerRequirements
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece


@dataclass(frozen=True, slots=True)
class Odd(Piece):
    """Work that needs no other."""

    kind: ClassVar[str] = "test"

    @property
    def needs(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Sleep(Odd):
    """Work that writes the id of its process to the store, then sleeps."""

    seconds: float

    def make(self, folder: Path, inputs: Inputs) -> None:
        (inputs.store.folder / f"pid-{os.getpid()}").touch()
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Die(Odd):
    """Work that its process does not survive."""

    def make(self, folder: Path, inputs: Inputs) -> None:
        os._exit(9)


@dataclass(frozen=True, slots=True)
class Hold(Odd):
    """Work that holds memory for a while; answers how much all such pieces of its process held at most meanwhile.

    Attributes:
        held_bytes: that it holds.
        number: of the piece.
    """

    held_bytes: int
    number: int

    def make(self, folder: Path, inputs: Inputs) -> int:
        mark, most_bytes = inputs.store.folder / f"holds-{os.getpid()}-{self.number}", 0
        memory = bytearray(self.held_bytes)
        mark.write_text(str(len(memory)))
        try:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                marks = inputs.store.folder.glob(f"holds-{os.getpid()}-*")
                most_bytes = max(most_bytes, sum(int(_text(each) or 0) for each in marks))
                time.sleep(0.02)
        finally:
            mark.unlink()
        return most_bytes


@dataclass(frozen=True, slots=True)
class Waiting(WorkerRequirements):
    """A worker that looks at itself until somebody has asked it to write `answered` into the store."""

    def problems(self) -> list[str]:
        (self.store.folder / "looking").touch()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if (self.store.folder / "answered").exists():
                return []
            time.sleep(0.02)
        return ["nobody could ask it"]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:  # its piece has ended
        return ""
