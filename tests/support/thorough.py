"""What `make test` leaves to longer runs: most variants of a test, and most of its random calls."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

VARIABLE = "EDGEKV_TEST_CALLS"
T = TypeVar("T")


def calls(usual: int) -> int:
    """How many random calls a test makes: so many, or those of EDGEKV_TEST_CALLS, which `make test-long` sets."""
    return max(usual, int(os.environ.get(VARIABLE) or 0))


def variants(values: Iterable[Any], usual: Container[Any]) -> list[ParameterSet]:
    """Values of a parameter, or tuples of several. Those that are not usual are for `make test-all` alone."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in usual else pytest.mark.thorough
        )
        for value in values
    ]


def spread(values: Sequence[T], count: int) -> list[T]:
    """So many of the values, two or more, at even distances: the first and the last are among them."""
    if len(values) <= count:
        return [*values]
    return [values[at * (len(values) - 1) // (count - 1)] for at in range(count)]


def at_most(examples: int) -> settings:
    """Settings of a law whose examples are slow: so many, or fewer in `make test`; see conftest.py."""
    return settings(max_examples=min(examples, settings().max_examples))
