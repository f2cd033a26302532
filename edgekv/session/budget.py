"""How many bytes the caches of all sequences may hold together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from edgekv.errors import EngineError, UsageError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*|%)")


class Budget(Protocol):
    """Says how much may be held now."""

    def allowance_bytes(self, held_bytes: int) -> int:
        """Bytes that all caches may hold together, those included that are held already.

        Raises:
            EngineError: the system does not tell what the budget depends on.
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


def free_memory_bytes() -> int:
    """Bytes that a process can still get without swapping: `MemAvailable` of Linux and Android, else free pages.

    A control group may allow less; give a budget in bytes there.

    Raises:
        EngineError: the system tells neither.
    """
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise EngineError(
            "memory budget",
            got="a system that does not tell its free memory",
            expected="/proc/meminfo or sysconf",
            fix="Give the budget in bytes, such as adaptive(64MiB).",
        ) from None


@dataclass(frozen=True, slots=True)
class FreeMemoryBudget:
    """A fraction of the memory that would be free if no cache were held: it shrinks as others take memory.

    Attributes:
        fraction: above 0, at most 1.
        free_bytes: reads the memory that is free now.
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


def parse_budget(text: str) -> Budget:
    """A budget as users write it: `64MiB`, `1.5GB`, `1000000` or `25%` (of the free memory).

    Raises:
        UsageError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match and match[2] == "%":
        return FreeMemoryBudget(Fraction(match[1]) / 100)
    if match and match[2] in _UNITS:
        return ByteBudget(int(Fraction(match[1]) * _UNITS[match[2]]))
    wanted = "bytes with or without a unit such as MiB, or a percentage of the free memory"
    raise UsageError("memory budget", got=repr(text), expected=wanted, fix="Use 64MiB or 50%.")
