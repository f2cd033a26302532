"""How long the blocks of a request are kept, and at which priority."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from edgekv.prefix.errors import PrefixError

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
_FIX = "Correct the retention policy."


def check_priority(field: str, priority: int) -> None:
    """Raise PrefixError unless a priority is 0 to 100."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise PrefixError(field, got=priority, expected=f"{MIN_PRIORITY} to {MAX_PRIORITY}", fix=_FIX)


def _check_duration(field: str, duration_ms: int | None) -> None:
    if duration_ms is not None and duration_ms < 1:
        raise PrefixError(field, got=duration_ms, expected="at least 1 ms, or None for no limit", fix=_FIX)


@dataclass(frozen=True, slots=True)
class Retention:
    """The priority of one block, and for how many milliseconds; None for no limit."""

    priority: int
    duration_ms: int | None


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """A priority for the prompt tokens `[token_start, token_end)`.

    Attributes:
        token_start: the first token.
        token_end: one past the last token; None for the end of the prompt.
        priority: 0 to 100; blocks of priority 100 are kept longest.
        duration_ms: milliseconds until the priority returns to 35; None for never.

    Raises:
        PrefixError: a field is out of range.
    """

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        if self.token_start < 0:
            raise PrefixError("token_start", got=self.token_start, expected="0 or above", fix=_FIX)
        if self.token_end is not None and self.token_end <= self.token_start:
            wanted = f"None or above token_start, {self.token_start}"
            raise PrefixError("token_end", got=self.token_end, expected=wanted, fix=_FIX)
        check_priority("priority", self.priority)
        _check_duration("duration_ms", self.duration_ms)

    def __str__(self) -> str:
        return f"[{self.token_start}, {'end' if self.token_end is None else self.token_end})"

    def holds(self, token: int) -> bool:
        """Whether a token is in the range."""
        return self.token_start <= token and (self.token_end is None or token < self.token_end)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The priorities of a request's blocks. A block has the priority of its first token, as in TensorRT-LLM.

    Attributes:
        ranges: non-overlapping ranges of the prompt, in any order; other prompt tokens request nothing.
        decode_retention_priority: the priority of blocks that begin with a generated token.
        decode_duration_ms: for how long; None for no limit.

    Raises:
        PrefixError: ranges overlap, or a field is out of its range.
    """

    ranges: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        check_priority("decode_retention_priority", self.decode_retention_priority)
        _check_duration("decode_duration_ms", self.decode_duration_ms)
        ordered = sorted(self.ranges, key=lambda r: r.token_start)
        for earlier, later in pairwise(ordered):
            if earlier.token_end is None or later.token_start < earlier.token_end:
                found = f"{earlier} and {later}"
                raise PrefixError("ranges", got=found, expected="ranges that do not overlap", fix=_FIX)

    def of(self, first_token: int, prompt_tokens: int) -> Retention | None:
        """The retention of the block that starts at a token; `prompt_tokens` is the length of the prompt."""
        if first_token >= prompt_tokens:
            return Retention(self.decode_retention_priority, self.decode_duration_ms)
        for entry in self.ranges:
            if entry.holds(first_token):
                return Retention(entry.priority, entry.duration_ms)
        return None
