"""Works of pieces that do not end, or end their process; workers import them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from exporters.sweep.store import PieceStore


@dataclass(frozen=True, slots=True)
class Sleep:
    """Work that leaves its process id, and ends when it is told to, or not at all."""

    seconds: float

    def __call__(self, folder: Path, store: PieceStore) -> None:
        (store.folder / f"pid-{os.getpid()}").touch()
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Die:
    """Work that its process does not survive."""

    def __call__(self, folder: Path, store: PieceStore) -> None:
        os._exit(9)
