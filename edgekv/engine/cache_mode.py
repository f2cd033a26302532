"""Cache modes: which sequences keep their keys and values between steps, and in how much memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.machine.system import free_memory_bytes, parse_bytes

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


class Mode(Protocol):
    """Decides which sequences are kept and which are recomputed."""

    @property
    def recomputed_tokens(self) -> int | None:
        """Sequences of at most this many tokens are recomputed in every step; None for every sequence."""

    @property
    def budget(self) -> CacheBudget | None:
        """Memory limit for the caches of all sequences; None for no limit."""

    @property
    def evicts(self) -> bool:
        """Whether the least recently used sequences are evicted when the budget is used up."""


@dataclass(frozen=True, slots=True)
class Always:
    """Every sequence is kept until it is dropped. If the budget is used up, new ones are refused."""

    budget: CacheBudget | None = None

    @property
    def recomputed_tokens(self) -> int:
        return 0

    @property
    def evicts(self) -> bool:
        return False

    def __str__(self) -> str:
        return "always" if self.budget is None else f"always({self.budget})"


@dataclass(frozen=True, slots=True)
class LongSequenceOnly:
    """Only sequences above a threshold are kept; shorter ones need no memory and are recomputed in every step.

    Attributes:
        threshold_tokens: at least 1; counts prompt and generated tokens.
    """

    threshold_tokens: int

    def __post_init__(self) -> None:
        if self.threshold_tokens < 1:
            wanted, fix = "a threshold of at least 1 token", "Use always to keep every sequence."
            raise UsageError("cache mode", got=self, expected=wanted, fix=fix)

    @property
    def recomputed_tokens(self) -> int:
        return self.threshold_tokens

    @property
    def budget(self) -> None:
        return None

    @property
    def evicts(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"long-sequence-only({self.threshold_tokens})"


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Every sequence is kept while memory lasts; then the least recently used are evicted.

    Attributes:
        budget: half of the free memory by default.
    """

    budget: CacheBudget = field(default_factory=lambda: FreeMemoryBudget(Fraction(1, 2)))

    @property
    def recomputed_tokens(self) -> int:
        return 0

    @property
    def evicts(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"adaptive({self.budget})"


@dataclass(frozen=True, slots=True)
class Disabled:
    """Nothing is kept: every step recomputes the whole sequence. A baseline for benchmarks."""

    @property
    def recomputed_tokens(self) -> None:
        return None

    @property
    def budget(self) -> None:
        return None

    @property
    def evicts(self) -> bool:
        return False

    def __str__(self) -> str:
        return "disabled"


_FORM = re.compile(r"([a-z-]+)(?:\(([^()]*)\))?")
_WANTED = "always, long-sequence-only(TOKENS), adaptive or disabled; always and adaptive take a budget, as in "
_EXAMPLES = "adaptive(64MiB) or adaptive(25%)"


def parse_mode(text: str) -> Mode:
    """A cache mode as users write it.

    `always`, `always(64MiB)`, `long-sequence-only(256)`, `adaptive`, `adaptive(64MiB)`, `adaptive(25%)` (of the
    free memory) or `disabled`.

    Raises:
        UsageError: it is none of these.
    """
    match = _FORM.fullmatch(text.strip())
    name, argument = (match[1], match[2]) if match else ("", None)
    if name == "always":
        return Always(None if argument is None else parse_budget(argument))
    if name == "adaptive":
        return Adaptive() if argument is None else Adaptive(parse_budget(argument))
    if name == "long-sequence-only" and argument is not None and re.fullmatch(r"[0-9]{1,18}", argument.strip()):
        return LongSequenceOnly(int(argument))
    if name == "disabled" and argument is None:
        return Disabled()
    raise UsageError("cache mode", got=repr(text), expected=_WANTED + _EXAMPLES, fix="Use always.")


def check_mode(mode: Mode, cache: KVCache) -> None:
    """Reject recomputation where it would change results.

    Keys and values computed while since evicted tokens were visible differ from recomputed ones, and a step of AR
    tokens that starts after S-AR sees fewer past tokens than single steps.

    Raises:
        UsageError: recomputed sequences may become so long that tokens leave a graph's window.
    """
    safe = cache.geometry.context - cache.ar[-1]
    limit = mode.recomputed_tokens
    if cache.policy == "fail" or (limit is not None and limit <= safe):
        return
    raise UsageError(
        f"cache mode {mode}",
        got=f"the context policy {cache.policy}",
        expected=f"fail, or at most {safe} tokens computed again",
        fix="Choose the policy fail, or keep the sequence: always, adaptive, or a lower threshold.",
    )
