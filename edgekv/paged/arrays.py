"""Checks of one argument: arrays of a given type and shape, integers, finite numbers."""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgekv.paged.errors import PagedInputError

Floats = NDArray[Any]
Ints = NDArray[np.int64]


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as the docstrings write it: `[3, 16]`."""
    return str(list(shape))


def check_array(field: str, array: object, dtype: DTypeLike, dims: int) -> NDArray[Any]:
    """`array` itself if it is an array of this type and number of dimensions.

    Raises:
        PagedInputError: it is not.
    """
    expected = f"a numpy array of {np.dtype(dtype)} with {dims} dimension{'s' if dims > 1 else ''}"
    if not isinstance(array, np.ndarray):
        raise PagedInputError(field, got=type(array).__name__, expected=expected)
    if array.dtype != dtype or array.ndim != dims:
        raise PagedInputError(field, got=f"{array.dtype} {shape_text(array.shape)}", expected=expected)
    return array


def check_shape(field: str, array: NDArray[Any], shape: tuple[int, ...], meaning: str) -> None:
    """Reject an array of another shape; `meaning` explains the expected one.

    Raises:
        PagedInputError: the shape differs.
    """
    if array.shape != shape:
        raise PagedInputError(field, got=shape_text(array.shape), expected=f"{shape_text(shape)}, {meaning}")


def check_range(field: str, array: NDArray[Any], low: int, stop: int | None, meaning: str) -> None:
    """Refuse integers below `low`, or from `stop` on.

    Raises:
        PagedInputError: the first such integer and its index.
    """
    outside = (array < low) if stop is None else (array < low) | (array >= stop)
    if outside.any():
        place = [int(i) for i in np.argwhere(outside)[0]]
        limits = f"at least {low}" if stop is None else f"{low} to {stop - 1}" if stop > low else "no entry"
        raise PagedInputError(field, got=f"{array[tuple(place)]} at {place}", expected=f"{limits}, {meaning}")


def check_begins(field: str, array: object, sequences: int, end: int, meaning: str) -> Ints:
    """Offsets `[B+1]` as int64, which rise from 0 to `end` and may repeat.

    Raises:
        PagedInputError: they are of another type or length, or do not rise from 0 to `end`.
    """
    begins: Ints = check_array(field, array, np.int32, 1).astype(np.int64)
    check_shape(field, begins, (sequences + 1,), "one more than past_lens")
    if begins[0] != 0 or begins[-1] != end or (np.diff(begins) < 0).any():
        raise PagedInputError(field, got=begins.tolist(), expected=f"numbers rising from 0 to {end}, {meaning}")
    return begins


def check_integer(field: str, value: object, low: int, meaning: str) -> int:
    """One integer of at least `low`: of Python, of numpy, or an array without dimensions.

    Raises:
        PagedInputError: it is of another type (booleans included), or below `low`.
    """
    expected = f"an integer of at least {low}, {meaning}"
    boolean = isinstance(value, (bool, np.bool_)) or (isinstance(value, np.ndarray) and value.dtype == np.bool_)
    if boolean or not isinstance(value, SupportsIndex):
        raise PagedInputError(field, got=repr(value), expected=expected)
    try:
        integer = operator.index(value)
    except TypeError:
        raise PagedInputError(field, got=repr(value), expected=expected) from None
    if integer < low:
        raise PagedInputError(field, got=integer, expected=expected)
    return integer


def check_finite(field: str, value: object, meaning: str) -> float:
    """One finite real number: of Python, of numpy, or an array without dimensions.

    Raises:
        PagedInputError: it is of another type, or not finite.
    """
    expected = f"a finite number, {meaning}"
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "iuf":
        raise PagedInputError(field, got=repr(value), expected=expected)
    if not math.isfinite(number := float(array)):
        raise PagedInputError(field, got=number, expected=expected)
    return number
