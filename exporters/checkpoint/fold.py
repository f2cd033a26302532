"""What a transform makes of one tensor: a map of its output channels, and one of its input channels.

A transform names the `Fold` of each tensor that it changes. All that is folded into a decoder's weights works this way:
outlier channels, the residual's rotation, neurons, heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import View
from quant import QuantizedWeight

Floats = NDArray[np.float32]
Rows = slice | NDArray[np.int64]  # of a tensor: its first dimension
Read = Callable[[str, Rows], Floats]
Map = Callable[[Floats], Floats]
EVERY = slice(None)


@dataclass(frozen=True, slots=True)
class Factors:
    """A matrix `left @ right`, such as an adapter's change, to which folds apply without multiplying it out.

    Attributes:
        left: `[out, r]`.
        right: `[r, in]`.
    """

    left: Floats
    right: Floats


@dataclass(frozen=True, slots=True)
class Fold:
    """`W` becomes `out_map(in_map(W))`.

    Attributes:
        out_map: of the output channels: a factor for each, `[out]`, or a function of the whole tensor `[out, ...]`.
        in_map: of the input channels of any rows, `[..., in]`. It may change its argument in place.
    """

    out_map: Floats | Map | None = None
    in_map: Map | None = None

    def read(self, read: Callable[[Rows], Floats], rows: Rows) -> Floats:
        """Some rows of the tensor after the fold.

        Args:
            read: rows before.
            rows: of the tensor after.
        """
        values = read(EVERY if callable(self.out_map) else rows)
        if self.in_map is not None:
            values = self.in_map(values)
        if callable(self.out_map):
            return self.out_map(values)[rows]
        if self.out_map is not None:
            values *= self.out_map[rows].reshape(-1, *[1] * (values.ndim - 1))
        return values

    def change(self, change: Factors) -> Factors:
        """A change of the matrix after the fold."""
        if self.in_map is not None:
            change = replace(change, right=self.in_map(change.right.copy()))
        if callable(self.out_map):
            return replace(change, left=self.out_map(change.left))
        return change if self.out_map is None else replace(change, left=change.left * self.out_map[:, None])

    def integers(self, weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
        """Rows of a quantized matrix after the fold: factors go into the scales of output channels.

        Raises:
            ValueError: the fold mixes channels, so that no integer stays.
        """
        if self.in_map is not None or callable(self.out_map):
            raise ValueError("got a matrix that is changed; expected one as it is stored")
        if self.out_map is None:
            return weight
        return QuantizedWeight(weight.integers, replace(weight.grid, scales=weight.scales * self.out_map[rows]))


Transform = Callable[[View], Fold | None]
"""The fold of a tensor; None if it stays."""


def folded(read: Read, views: Mapping[str, View], transforms: Iterable[Transform]) -> Read:
    """Reads tensors after transforms, the first one first.

    Args:
        read: tensors before, by name and rows.
        views: of the decoder, by name.
        transforms: to apply.
    """
    for transform in transforms:
        read = partial(_read_folded, read, views, transform)
    return read


def _read_folded(read: Read, views: Mapping[str, View], transform: Transform, name: str, rows: Rows) -> Floats:
    fold = transform(views[name]) if name in views else None  # what is computed from several tensors stays
    return read(name, rows) if fold is None else fold.read(partial(read, name), rows)


def folds(view: View, transforms: Iterable[Transform]) -> list[Fold]:
    """The folds of a tensor, the first one first."""
    return [fold for transform in transforms if (fold := transform(view)) is not None]
