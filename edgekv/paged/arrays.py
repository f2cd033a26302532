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


def check_array(field: str, given: object, dtype: DTypeLike, dims: int) -> NDArray[Any]:
    """`given` itself if it is an array of this type and number of dimensions.

    Raises:
        PagedInputError: it is not.
    """
    wanted = f"a numpy array of {np.dtype(dtype)} with {dims} dimension{'s' if dims > 1 else ''}"
    if not isinstance(given, np.ndarray):
        raise PagedInputError(field, got=type(given).__name__, expected=wanted)
    if given.dtype != dtype or given.ndim != dims:
        raise PagedInputError(field, got=f"{given.dtype} {shape_text(given.shape)}", expected=wanted)
    return given


def check_shape(field: str, given: NDArray[Any], shape: tuple[int, ...], meaning: str) -> None:
    """Reject an array of another shape; `meaning` explains the expected one.

    Raises:
        PagedInputError: the shape differs.
    """
    if given.shape != shape:
        raise PagedInputError(field, got=shape_text(given.shape), expected=f"{shape_text(shape)}, {meaning}")


def check_range(field: str, given: NDArray[Any], low: int, stop: int | None, meaning: str) -> None:
    """Refuse integers below `low`, or from `stop` on.

    Raises:
        PagedInputError: the first such integer and its index.
    """
    outside = (given < low) if stop is None else (given < low) | (given >= stop)
    if outside.any():
        place = [int(i) for i in np.argwhere(outside)[0]]
        limits = f"at least {low}" if stop is None else f"{low} to {stop - 1}" if stop > low else "no entry"
        raise PagedInputError(field, got=f"{given[tuple(place)]} at {place}", expected=f"{limits}, {meaning}")


def check_begins(field: str, given: object, sequences: int, end: int, meaning: str) -> Ints:
    """Offsets `[B+1]` as int64, which rise from 0 to `end` and may repeat.

    Raises:
        PagedInputError: they are of another type or length, or do not rise from 0 to `end`.
    """
    begins: Ints = check_array(field, given, np.int32, 1).astype(np.int64)
    check_shape(field, begins, (sequences + 1,), "one more than past_lens")
    if begins[0] != 0 or begins[-1] != end or (np.diff(begins) < 0).any():
        raise PagedInputError(field, got=begins.tolist(), expected=f"numbers rising from 0 to {end}, {meaning}")
    return begins


def check_integer(field: str, given: object, low: int, meaning: str) -> int:
    """One integer of at least `low`: of Python, of numpy, or an array without dimensions.

    Raises:
        PagedInputError: it is of another type (booleans included), or below `low`.
    """
    wanted = f"an integer of at least {low}, {meaning}"
    boolean = isinstance(given, (bool, np.bool_)) or (isinstance(given, np.ndarray) and given.dtype == np.bool_)
    if boolean or not isinstance(given, SupportsIndex):
        raise PagedInputError(field, got=repr(given), expected=wanted)
    try:
        integer = operator.index(given)
    except TypeError:
        raise PagedInputError(field, got=repr(given), expected=wanted) from None
    if integer < low:
        raise PagedInputError(field, got=integer, expected=wanted)
    return integer


def check_finite(field: str, given: object, meaning: str) -> float:
    """One finite real number: of Python, of numpy, or an array without dimensions.

    Raises:
        PagedInputError: it is of another type, or not finite.
    """
    wanted = f"a finite number, {meaning}"
    array = np.asarray(given)
    if array.shape != () or array.dtype.kind not in "iuf":
        raise PagedInputError(field, got=repr(given), expected=wanted)
    if not math.isfinite(number := float(array)):
        raise PagedInputError(field, got=number, expected=wanted)
    return number
