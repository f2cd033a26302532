"""Works of pieces that do not end, end their process, or hold memory; workers import them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from exporters.sweep.fitness import Fitness
from exporters.sweep.store import PieceStore


@dataclass(frozen=True, slots=True)
class Sleep:
    """Work that writes the id of its process to the store, then sleeps."""

    seconds: float

    def __call__(self, folder: Path, store: PieceStore) -> None:
        (store.folder / f"pid-{os.getpid()}").touch()
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Die:
    """Work that its process does not survive."""

    def __call__(self, folder: Path, store: PieceStore) -> None:
        os._exit(9)


@dataclass(frozen=True, slots=True)
class Hold:
    """Work that holds memory for a while; answers how much all such pieces of its process held at most meanwhile.

    Attributes:
        held_bytes: that it holds.
        number: of the piece.
    """

    held_bytes: int
    number: int

    def __call__(self, folder: Path, store: PieceStore) -> int:
        mark, most_bytes = store.folder / f"holds-{os.getpid()}-{self.number}", 0
        memory = bytearray(self.held_bytes)
        mark.write_text(str(len(memory)))
        try:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                marks = store.folder.glob(f"holds-{os.getpid()}-*")
                most_bytes = max(most_bytes, sum(int(_text(each) or 0) for each in marks))
                time.sleep(0.02)
        finally:
            mark.unlink()
        return most_bytes


@dataclass(frozen=True, slots=True)
class Waiting(Fitness):
    """A worker that looks at itself until somebody has asked it to write `answered` into the store."""

    def obstacles(self) -> list[str]:
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
