"""The memory budget of the caches of all sequences."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from edgekv.errors import UsageError
from edgekv.system import free_memory_bytes, parse_bytes

_PERCENTAGE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) ?%")


class CacheBudget(Protocol):
    """A limit on the memory of the caches of all sequences."""

    def allowance_bytes(self, held_bytes: int) -> int:
        """Maximum bytes of all caches together, including those already allocated.

        Raises:
            EngineError: the system does not report the memory that the budget depends on.
        """


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """A fixed number of bytes.

    Attributes:
        limit_bytes: at least 1.
    """

    limit_bytes: int

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise UsageError("memory budget", got=self, expected="at least 1 byte", fix="Use 64MiB or more.")

    def allowance_bytes(self, held_bytes: int) -> int:
        return self.limit_bytes

    def __str__(self) -> str:
        return str(self.limit_bytes)


@dataclass(frozen=True, slots=True)
class FreeMemoryBudget:
    """A fraction of the memory that would be free without caches; it shrinks as other programs use memory.

    Attributes:
        fraction: above 0, at most 1.
        free_bytes: reads the free memory.
    """

    fraction: Fraction
    free_bytes: Callable[[], int] = free_memory_bytes

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UsageError("memory budget", got=self, expected="above 0%, at most 100%", fix="Use 50%.")

    def allowance_bytes(self, held_bytes: int) -> int:
        return int(self.fraction * (self.free_bytes() + held_bytes))

    def __str__(self) -> str:
        return f"{float(self.fraction * 100):g}%"


def parse_budget(text: str) -> CacheBudget:
    """A budget as users write it: `64MiB`, `1.5GB`, `1000000` or `25%` (of the free memory).

    Raises:
        UsageError: it is none of these.
    """
    match = _PERCENTAGE.fullmatch(text.strip())
    if match:
        return FreeMemoryBudget(Fraction(match[1]) / 100)
    try:
        limit_bytes = parse_bytes("memory budget", text)
    except UsageError:
        wanted = "bytes with or without a unit such as MiB, or a percentage of the free memory"
        raise UsageError("memory budget", got=repr(text), expected=wanted, fix="Use 64MiB or 50%.") from None
    return ByteBudget(limit_bytes)
