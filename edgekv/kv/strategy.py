"""Update strategies: how the rows of the cache are laid out and what a step costs in copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgekv.kv.move import Move
from edgekv.kv.window import Window


class Strategy(Protocol):
    """Decides in pure integers where rows lie; the arena executes the moves that it returns, in order.

    A strategy trusts its caller: `KVCache` has checked every argument, so that a refused call changes nothing.
    All tensors have the same layout, so one row number stands for a row of each of the N tensors. A token's age is
    its place among the tokens held: 0 for the oldest.
    """

    @property
    def rows(self) -> int:
        """Rows of each tensor in the arena."""

    @property
    def scratch_rows(self) -> int:
        """Rows of each scratch tensor, where new rows land that are copied later; 0 if they land in place."""

    @property
    def mirrored(self) -> bool:
        """Whether the rows are mapped twice: row r + `rows` is row r again."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        """Make a step of AR new tokens and `columns` past rows possible; return what must be copied before it runs."""

    def first_row(self, columns: int) -> int:
        """First of the rows that a graph with so many past columns would read now; below 0 before `prepare`."""

    def window(self, ar: int, columns: int) -> Window:
        """What that step sees, once it is prepared."""

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        """Let the oldest tokens go and keep the first new rows of the prepared step; return what must be copied.

        Args:
            tokens: how many new rows are kept, at most its AR.
            evicted: how many of the oldest leave; at most `tokens` and at most `length`.
        """

    def rewind(self, tokens: int) -> Sequence[Move]:
        """Drop the `tokens` newest; return what must be copied."""

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        """Drop the tokens of these ages, ascending; return what must be copied."""

    def reset(self, length: int = 0) -> None:
        """Drop all tokens, then hold `length` others (at most S), whose rows the caller writes."""

    def held_rows(self) -> list[int]:
        """The arena rows of the tokens held, oldest token first."""
