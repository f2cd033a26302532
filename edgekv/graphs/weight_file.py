"""A file of constants that several graphs share."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Extent

_ALIGNMENT_BYTES = 4096  # pages: the runtime maps the file


class WeightFile:
    """Constants written one after the other; a graph refers to their places in the file.

    Attributes:
        location: the file's name in the references.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        """Args: file: to write to. location: its name in the end."""
        self.location = location
        self._file = file
        self._length_bytes = 0

    def write(self, array: NDArray[Any]) -> Extent:
        """Append an array; returns its place."""
        self._append(b"\0" * (-self._length_bytes % _ALIGNMENT_BYTES))
        place = Extent(self._length_bytes, array.nbytes)
        self._append(np.ascontiguousarray(array).data)
        return place

    def _append(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._length_bytes += len(content) if isinstance(content, bytes) else content.nbytes
