"""How long the blocks of a request are kept, and at which priority."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from edgekv.errors import PrefixError
from edgekv.option import Option

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
_FIX = "Correct the retention policy."
# More digits than any number of tokens or milliseconds, fewer than Python's limit.
_RANGE = re.compile(r"(\d{1,18})-(\d{0,18}):(\d{1,18})(?::(\d{1,18}))?")


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
            expected = f"None or above token_start, {self.token_start}"
            raise PrefixError("token_end", got=self.token_end, expected=expected, fix=_FIX)
        check_priority("priority", self.priority)
        _check_duration("duration_ms", self.duration_ms)

    def __str__(self) -> str:
        return f"[{self.token_start}, {'end' if self.token_end is None else self.token_end})"

    def holds(self, token: int) -> bool:
        return self.token_start <= token and (self.token_end is None or token < self.token_end)


def _read_range(option: str, text: str) -> TokenRangeRetentionConfig:
    """A range as users write it: `0-448:100` or `0-448:100:60000`; without an end, `0-:100`."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        expected = "START-END:PRIORITY or START-END:PRIORITY:MS"
        raise PrefixError(option, got=repr(text[:80]), expected=expected, fix="Write 0-448:100, for example.")
    start, end, priority, duration_ms = match.groups()
    return TokenRangeRetentionConfig(
        int(start), int(end) if end else None, int(priority), None if duration_ms is None else int(duration_ms)
    )


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The priorities of a request's blocks. A block has the priority of its first token, as in TensorRT-LLM.

    Raises:
        PrefixError: ranges overlap, or a field is out of its range.
    """

    ranges: Annotated[
        tuple[TokenRangeRetentionConfig, ...],
        Option(
            "Keep these prompt tokens with a priority of 0 to 100 (default 35), for MS milliseconds; END may be left "
            "out. Repeat for several ranges, which must not overlap.",
            "--retention",
            metavar="START-END:PRIORITY[:MS]",
            parse=_read_range,
            collect=tuple,
        ),
    ] = ()
    decode_retention_priority: Annotated[int, Option("Priority of generated tokens, 0 to 100.")] = DEFAULT_PRIORITY
    decode_duration_ms: Annotated[
        int | None, Option("Milliseconds until that priority returns to 35.", shown="no limit")
    ] = None

    def __post_init__(self) -> None:
        check_priority("decode_retention_priority", self.decode_retention_priority)
        _check_duration("decode_duration_ms", self.decode_duration_ms)
        ordered = sorted(self.ranges, key=lambda r: r.token_start)
        for earlier, later in pairwise(ordered):
            if earlier.token_end is None or later.token_start < earlier.token_end:
                got = f"{earlier} and {later}"
                raise PrefixError("ranges", got=got, expected="ranges that do not overlap", fix=_FIX)

    def of(self, first_token: int, prompt_tokens: int) -> Retention | None:
        """The retention of the block that starts at a token; `prompt_tokens` is the length of the prompt."""
        if first_token >= prompt_tokens:
            return Retention(self.decode_retention_priority, self.decode_duration_ms)
        entry = next((priority_range for priority_range in self.ranges if priority_range.holds(first_token)), None)
        return None if entry is None else Retention(entry.priority, entry.duration_ms)
