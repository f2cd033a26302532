"""The float32 reference's logits, computed once for a text and kept in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgekv.graphs.decoder
import exporters.quantize.reference
from edgekv.machine.scratch import atomic_file
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Floats, Reference


class CachedReference:
    """Like `Reference`, but the last layer's outputs are read from a file if they were computed before.

    The logits are computed from them each time: they are `vocab / hidden` times larger.
    """

    def __init__(self, checkpoint: Checkpoint, context: int, folder: Path) -> None:
        """Read and write files in `folder`; other arguments as for `Reference`."""
        self._reference = Reference(checkpoint, context)
        sources = (edgekv.graphs.decoder, exporters.quantize.reference)
        code = b"".join(Path(str(module.__file__)).read_bytes() for module in sources)
        self._subject = (checkpoint.weights_sha256(), repr(checkpoint.spec), context, hashlib.sha256(code).hexdigest())
        self._folder = folder

    def logits(self, windows: Sequence[NDArray[Any]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window of token ids `[T]`."""
        key = hashlib.sha256(repr((self._subject, [window.tolist() for window in windows])).encode()).hexdigest()
        file = self._folder / f"reference-{key[:16]}.npz"
        if not file.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as partial, partial.open("wb") as target:
                np.savez(target, *self._reference.states(windows))
        with np.load(file) as states:
            yield from self._reference.head(states[name] for name in states.files)
