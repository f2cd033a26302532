"""The table of embeddings: 8-bit integers and a scale for each row.

Scales are multiples of one step, of 16 bits: graphs that look embeddings up multiply the integers of a row by its
scale, both as integers. A table that is the head's matrix too has these scales there, and the head's integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import EMBEDDING, LAYER_INPUTS
from exporters.checkpoint.columns import blocks_of_rows, outlier_columns
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.reference import Floats
from quant import DTYPES, Dtype, Encoding, Grid, Range

_MOST = 127
_STEPS: Dtype = "u16"
_LAYER_ELEMENTS = 1 << 25  # of rows that are held in float32 at a time


@dataclass(frozen=True, slots=True)
class Table:
    """The scales of a table `[V, hidden]`, whose integers are read some rows at a time.

    Attributes:
        tensors: have the exact table.
        columns: divide the columns before rows are rounded, `[hidden]`; None if no column is an outlier.
        steps: of the scales, uint16 `[V, 1]`.
        encoding: of the steps.
        reach: the minimum and maximum embedding, 0 or beyond.
    """

    tensors: Tensors
    columns: Floats | None
    steps: NDArray[np.uint16]
    encoding: Encoding
    reach: tuple[float, float]

    @classmethod
    def of(cls, tensors: Tensors) -> Table:
        """Read the table once or twice for its scales."""
        vocab, turned = tensors.spec.vocab, tensors.spec.vocabulary == "turned"
        columns = None if turned else outlier_columns(vocab, tensors.tensor)
        blocks = (tensors.tensor(EMBEDDING, rows) for rows in blocks_of_rows(vocab))
        ends = [(values.min(), values.max(), np.abs(_divided(values, columns)).max(axis=1)) for values in blocks]
        most = np.concatenate([peak for *_, peak in ends]) / np.float32(_MOST)
        encoding = Encoding.asymmetric(0.0, float(most.max()), _STEPS)
        steps = np.ceil(most / np.float32(encoding.scale)).clip(1, encoding.limits[1])
        reach = min(float(low) for low, *_ in ends), max(float(high) for _, high, _ in ends)
        return cls(tensors, columns, steps.astype(DTYPES[_STEPS])[:, None], encoding, reach)

    def encoding_with(self, embedded: Range | None, dtype: Literal["u16", "s16"]) -> Encoding:
        """Of embeddings, and of the rows that the host puts in their place, if there are any."""
        low, high = self.reach
        if embedded is not None:
            low, high = min(low, embedded.low), max(high, embedded.high)
        if dtype == "s16":
            return Encoding.symmetric(max(-low, high), dtype)
        return Encoding.asymmetric(low, high, dtype)

    @property
    def column_encoding(self) -> Encoding:
        """In which the factors of columns are exact."""
        assert self.columns is not None, "a table with factors"
        return Encoding(_STEPS, float(self.columns.min()), 0)

    @property
    def scaled_encoding(self) -> Encoding:
        """Of the integers of rows times the factors of columns."""
        assert self.columns is not None, "a table with factors"
        return Encoding.symmetric(_MOST * float(self.columns.max()), _STEPS)

    @property
    def scales(self) -> NDArray[np.float32]:
        """`[V]`."""
        return self.encoding.dequantize(self.steps)[:, 0]

    def integers(self, rows: slice | NDArray[np.int64]) -> NDArray[np.int8]:
        """Some rows, rounded to nearest."""
        scaled = _divided(self.tensors.tensor(EMBEDDING, rows), self.columns) / self.scales[rows, None]
        return np.rint(scaled).clip(-_MOST, _MOST).astype(np.int8)

    def embeddings(self, tokens: NDArray[np.int64]) -> Floats:
        """The rounded rows of tokens, `[T, hidden]`; those of pictures, beyond the table, are hardly rounded."""
        beyond = tokens >= len(self.steps)
        inside = np.where(beyond, 0, tokens)
        rows: Floats = self.integers(inside) * self.scales[inside, None]
        if self.columns is not None:
            rows = rows * self.columns
        if beyond.any():
            rows[beyond] = self.tensors.tensor(EMBEDDING, tokens[beyond])
        return rows

    def blocks(self) -> Iterator[NDArray[np.int8]]:
        """All rows, some at a time."""
        return (self.integers(rows) for rows in blocks_of_rows(self.tensors.spec.vocab))

    def grid(self, rows: slice) -> Grid:
        """Of some rows as output channels of a head."""
        return Grid("int8", self.scales[rows])


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The table of what layers read of each token, `[V, layers * P]`: 8-bit integers and a scale for each row.

    The host alone reads it, so scales are floats.

    Attributes:
        tensors: have the exact table.
    """

    tensors: Tensors

    @property
    def shape(self) -> tuple[int, int]:
        """`[V, layers * P]`."""
        spec = self.tensors.spec
        return spec.vocab, spec.layers * spec.layer_inputs

    def blocks(self) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float32]]]:
        """Integers and scales of all rows, some at a time."""
        rows_at_once = max(1, _LAYER_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], rows_at_once):
            yield _rounded(self.tensors.tensor(LAYER_INPUTS, slice(first, first + rows_at_once)))


def rounded_rows(rows: Floats) -> Floats:
    """Rows `[T, layers * P]` as a `LayerTable` stores them."""
    integers, scales = _rounded(rows)
    stored: Floats = integers * scales[:, None]
    return stored


def _rounded(rows: Floats) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    scales = np.maximum(np.abs(rows).max(axis=1) / np.float32(_MOST), np.finfo(np.float32).tiny)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales


def _divided(rows: Floats, columns: Floats | None) -> Floats:
    return rows if columns is None else rows / columns
