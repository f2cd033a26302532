"""The values of all calibration windows: in memory while there is room, beyond it in files of which one is read."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from exporters.quantize.reference import Floats

_FLOAT_BYTES = 4


class Room:
    """Memory for values of windows.

    While memory is taken for an owner, that of values which are gone is kept for the next of the same size: the system
    fills new memory with zeros, which takes as long as to compute some of them.

    Args:
        free_bytes: that they may take together.
    """

    def __init__(self, free_bytes: int = 0) -> None:
        self._free_bytes = free_bytes
        self._owners = 0
        self._kept: list[Floats] = []

    def array(self, shape: tuple[int, ...]) -> Floats | None:
        """Memory for values of this shape until nobody has them any more; None if there is not enough."""
        size_bytes = _FLOAT_BYTES * prod(shape)
        if size_bytes > self._free_bytes:
            return None
        at = next((at for at, kept in enumerate(self._kept) if kept.nbytes == size_bytes), None)
        memory = None if at is None else self._kept.pop(at)
        self._use(size_bytes)
        if memory is None:
            memory = np.empty(prod(shape), np.float32)
        values = np.frombuffer(memory.data, np.float32)  # all of its parts refer to it, not to `memory`
        weakref.finalize(values, self._give_back, memory)
        return values.reshape(shape)

    def take(self, size_bytes: int, most: int, owner: object) -> int:
        """Take memory that many times at most, as often as it is there, until `owner` is gone; returns how often."""
        count = min(most, self._free_bytes // size_bytes)
        self._use(count * size_bytes)
        self._owners += 1
        weakref.finalize(owner, self._end, count * size_bytes)
        return count

    def _use(self, size_bytes: int) -> None:
        """Take memory, and free what is kept beyond the bytes that are left."""
        self._free_bytes -= size_bytes
        while sum(kept.nbytes for kept in self._kept) > self._free_bytes:
            self._kept.pop(0)

    def _give_back(self, memory: Floats) -> None:
        self._free_bytes += memory.nbytes
        if self._owners:
            self._kept.append(memory)

    def _end(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        self._owners -= 1
        if not self._owners:
            self._kept.clear()


class Windows:
    """Values `[windows, decoders, T, width]`; a window `[decoders, T, width]` is read or written at a time.

    Several threads may read at a time.

    Args:
        source: the values, or an open file that has them.
        shape: see above.
        offset: where they begin in the file.
    """

    def __init__(self, source: BinaryIO | Floats, shape: tuple[int, ...], offset: int = 0) -> None:
        self._source = source
        self.shape = shape
        self._offset = offset
        self._reading = threading.Lock()

    @classmethod
    def of(cls, windows: Iterable[Floats], count: int, folder: Path | None, room: Room | None = None) -> Windows:
        """Keep windows of one shape, in memory or in a file without a name.

        Args:
            windows: `[decoders, T, width]` each, computed one after another.
            count: of them, at least 1.
            folder: on the disk to use; None for that of temporary files.
            room: in memory; None for none.

        Raises:
            OSError: the disk is full.
        """
        kept: Windows | None = None
        for number, values in enumerate(windows):
            if kept is None:
                shape = count, *values.shape
                source: BinaryIO | Floats | None = None if room is None else room.array(shape)
                if source is None:
                    source = cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
                kept = cls(source, shape)
            kept._put(number, values)
        assert kept is not None, "a text has windows"
        if isinstance(kept._source, np.ndarray):
            kept._source.setflags(write=False)
        return kept

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
        if isinstance(self._source, np.ndarray):
            return self._source.reshape(-1)[first : first + prod(shape)].reshape(shape)
        values = np.empty(shape, np.float32)
        left = values.reshape(-1).view(np.uint8).data
        with self._reading:
            self._source.seek(self._offset + _FLOAT_BYTES * first)
            while left:
                count = self._source.readinto(left)  # type: ignore[attr-defined]
                if not count:
                    raise EOFError(f"got a file that ends {len(left)} bytes early; expected values {self.shape}")
                left = left[count:]
        return values

    def _put(self, window: int, values: Floats) -> None:
        if isinstance(self._source, np.ndarray):
            self._source[window] = values
            return
        self._source.seek(_FLOAT_BYTES * prod(self.shape[1:]) * window)
        left = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        while left:
            left = left[self._source.write(left) :]


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
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def _each(self) -> int:
        return self.windows.shape[2] - self.first


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows `[tokens, width]` of all, and of these some columns.

    Attributes:
        rows: all of them.
        tokens: which, ascending.
        columns: of each row; `width` follows from them.
        width: their number.
    """

    rows: TokenRows
    tokens: NDArray[np.intp]
    columns: slice
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """`[tokens, width]`."""
        return len(self.tokens), self.width

    def __getitem__(self, tokens: slice) -> Floats:
        chosen = self.tokens[tokens]
        if not len(chosen):
            return np.zeros((0, self.width), np.float32)
        first = int(chosen[0])
        rows: Floats = self.rows[first : int(chosen[-1]) + 1][chosen - first, self.columns]
        return rows


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Some columns of rows, `[tokens, width]`.

    Attributes:
        rows: with all columns.
        first: the first of them.
        width: their number.
    """

    rows: TokenRows
    first: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """`[tokens, width]`."""
        return self.rows.shape[0], self.width

    def __getitem__(self, tokens: slice) -> Floats:
        return self.rows[tokens][:, self.first : self.first + self.width]


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
