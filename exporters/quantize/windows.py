"""The values of all calibration windows in a file, so that memory holds those of one and not of the whole text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from exporters.quantize.reference import Floats

_FLOAT_BYTES = 4


class Windows:
    """Values `[windows, decoders, T, width]` in a file; a window `[decoders, T, width]` is read or written at a time.

    Args:
        file: that has them, open.
        shape: see above.
        offset: where they begin.
    """

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], offset: int = 0) -> None:
        self._file = file
        self.shape = shape
        self._offset = offset

    @classmethod
    def of(cls, windows: Iterable[Floats], count: int, folder: Path | None) -> Windows:
        """Write windows of one shape to a file without a name.

        Args:
            windows: `[decoders, T, width]` each, computed one after another.
            count: of them, at least 1.
            folder: on the disk to use; None for that of temporary files.

        Raises:
            OSError: the disk is full.
        """
        found: Windows | None = None
        for number, values in enumerate(windows):
            if found is None:
                file = cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
                found = cls(file, (count, *values.shape))
            found._put(number, values)
        assert found is not None, "a text has windows"
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, window: int) -> Floats:
        if window >= len(self):
            raise IndexError(window)
        return self._read(prod(self.shape[1:]) * window, self.shape[1:])

    def __iter__(self) -> Iterator[Floats]:
        return (self[window] for window in range(len(self)))

    def decoder(self, number: int, first: int) -> TokenRows:
        """The values of one decoder, without the first positions of each window."""
        return TokenRows(self, number, first)

    def positions(self, window: int, decoder: int, start: int, stop: int) -> Floats:
        """`[stop - start, width]`."""
        _, decoders, tokens, width = self.shape
        return self._read(((window * decoders + decoder) * tokens + start) * width, (stop - start, width))

    def _read(self, first: int, shape: tuple[int, ...]) -> Floats:
        values = np.empty(shape, np.float32)
        self._file.seek(self._offset + _FLOAT_BYTES * first)
        left = values.reshape(-1).view(np.uint8).data
        while left:
            count = self._file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"got a file that ends {len(left)} bytes early; expected values {self.shape}")
            left = left[count:]
        return values

    def _put(self, window: int, values: Floats) -> None:
        self._file.seek(_FLOAT_BYTES * prod(self.shape[1:]) * window)
        left = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        while left:
            left = left[self._file.write(left) :]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows `[tokens, width]` of all windows in order, of which some are read at a time.

    Attributes:
        windows: the values.
        decoder: whose.
        first: position of each window with which its rows begin.
    """

    windows: Windows
    decoder: int
    first: int

    @property
    def shape(self) -> tuple[int, int]:
        """`[tokens, width]`."""
        return len(self.windows) * self._each, self.windows.shape[3]

    def __getitem__(self, tokens: slice) -> Floats:
        start, stop, _ = tokens.indices(self.shape[0])
        parts = []
        while start < stop:
            window, at = divmod(start, self._each)
            end = min(self._each, at + stop - start)
            parts.append(self.windows.positions(window, self.decoder, self.first + at, self.first + end))
            start += end - at
        return np.concatenate(parts)

    @property
    def _each(self) -> int:
        return self.windows.shape[2] - self.first


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows `[tokens, width]`: one less another, times a factor."""

    rows: TokenRows
    less: TokenRows
    factor: np.float32

    @property
    def shape(self) -> tuple[int, int]:
        """`[tokens, width]`."""
        return self.rows.shape

    def __getitem__(self, tokens: slice) -> Floats:
        return (self.rows[tokens] - self.less[tokens]) * self.factor
