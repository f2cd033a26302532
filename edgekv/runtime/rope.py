"""Cosines and sines of all positions, as integers in the graph's encodings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.spec import rope_inputs
from quant import DTYPES, Encoding

Table = NDArray[Any]


class RopeTable:
    """Rows of cosines and sines, `[positions, R/2]`, in the encodings of the graph's inputs.

    An element is trunc(attention_factor * cos(position * frequency) / scale + zero_point) in float64, with the scale
    rounded to float32 as in the graph. It truncates as Genie does, so that both produce the same bits. Positions
    can exceed those of training: attention depends only on differences of positions, which stay below S.
    """

    def __init__(
        self,
        inverse_frequencies: Sequence[float] | NDArray[np.float64],
        cos: Encoding,
        sin: Encoding,
        *,
        positions: int = 1,
        attention_factor: float = 1.0,
    ) -> None:
        self._frequencies = np.asarray(inverse_frequencies, np.float64)
        self._encodings = (cos, sin)
        self._factor = attention_factor
        self._cos, self._sin = self._compute(0, positions)

    def rows(self, position: int, count: int) -> tuple[Table, Table]:
        """Cosines and sines `[count, R/2]` from `position` on; the table grows as needed."""
        if (end := position + count) > len(self._cos):
            more = self._compute(len(self._cos), max(end, 2 * len(self._cos)))
            self._cos, self._sin = (np.concatenate(pair) for pair in zip((self._cos, self._sin), more, strict=True))
        return self._cos[position:end], self._sin[position:end]

    def _compute(self, start: int, stop: int) -> tuple[Table, Table]:
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * self._frequencies
        cos, sin = self._encodings
        return _truncate(self._factor * np.cos(angles), cos), _truncate(self._factor * np.sin(angles), sin)


def rope_tables(manifest: Manifest) -> dict[str, RopeTable]:
    """A table for every rotary embedding of a bundle, by the suffix of its inputs' names, for one context."""
    tables = {}
    for suffix, rotation in manifest.rotations.items():
        cos, sin = (manifest.encodings[name] for name in rope_inputs(suffix))
        tables[suffix] = RopeTable(
            rotation.inverse_frequencies,
            cos,
            sin,
            positions=manifest.context,
            attention_factor=rotation.attention_factor,
        )
    return tables


def _truncate(real: NDArray[np.float64], encoding: Encoding) -> Table:
    steps = np.trunc(real / np.float64(np.float32(encoding.scale)) + encoding.zero_point)
    table: Table = np.clip(steps, *encoding.limits).astype(DTYPES[encoding.dtype])
    return table
