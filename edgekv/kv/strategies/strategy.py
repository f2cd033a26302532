"""Update strategies: the row positions of a cache and the copies of a step. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

Place = Literal["arena", "scratch"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a range of rows in every tensor at once; source and destination may overlap.

    Attributes:
        src_row: first row read, of a tensor in `src`.
        dst_row: first row written, of the same tensor in `dst`.
        rows: number of rows; at least 1.
        src: the cache tensors (`arena`) or the small tensors that receive new rows (`scratch`).
        dst: the same choice for the destination.
    """

    src_row: int
    dst_row: int
    rows: int
    src: Place = "arena"
    dst: Place = "arena"

    def around(self, rows: int) -> Move:
        """The same move in a ring of `rows` rows: it begins before its end."""
        src_row = self.src_row % rows if self.src == "arena" else self.src_row
        dst_row = self.dst_row % rows if self.dst == "arena" else self.dst_row
        return replace(self, src_row=src_row, dst_row=dst_row)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of each tensor that the graph for `ar` new tokens reads and writes, and the valid columns.

    The attention mask of these layers has P + AR columns: P for the past, then AR for the new tokens.

    Attributes:
        ar: tokens per inference of the graph.
        columns: P, the past rows that the graph reads: S-AR, or W-1 of layers whose window W is smaller; fewer if it
            reads only those in use.
        past_row: first of these rows, as a row of the arena's tensor.
        new_row: row of the first of the AR new rows, in the arena's tensor if `in_place`, else in the scratch tensor.
        in_place: whether the new rows are written to their final place, so that appending copies nothing.
        first: first valid column of the past.
        stop: one past the last valid column of the past, at most P.
        leaving: valid columns, oldest first, that the last of the AR new rows does not see because they are outside
            these layers' window. Each row before it sees one more of them.
    """

    ar: int
    columns: int
    past_row: int
    new_row: int
    in_place: bool
    first: int
    stop: int
    leaving: tuple[int, ...] = ()

    def unseen(self, depth: int) -> list[int]:
        """Valid columns that a new token does not see if `depth` others are before it in the step."""
        return list(self.leaving[: max(0, depth + 1 - (self.ar - len(self.leaving)))])


class Strategy(Protocol):
    """Decides row positions in pure integers; the arena executes the returned moves in order.

    Arguments are not checked: `KVCache` has checked them.
    All tensors have the same layout, so one row number refers to a row of each of the N tensors. A token's age is
    its place among the tokens held: 0 for the oldest.
    """

    @property
    def rows(self) -> int:
        """Rows of each tensor in the arena."""

    @property
    def scratch_rows(self) -> int:
        """Rows of each scratch tensor, for new rows that are copied later; 0 if rows are written in place."""

    @property
    def mirrored(self) -> bool:
        """Whether the rows are mapped twice: row r + `rows` is the same memory as row r."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def prepare(self, ar: int, columns: int) -> Sequence[Move]:
        """Prepare a step of AR new tokens and `columns` past rows; return the copies to make before it runs."""

    def first_row(self, columns: int) -> int:
        """First row that a graph with `columns` past columns would read now; below 0 before `prepare`."""

    def window(self, ar: int, columns: int) -> Window:
        """The window of that step, once it is prepared."""

    def commit(self, tokens: int, evicted: int) -> Sequence[Move]:
        """Evict the oldest tokens and keep the first new rows of the prepared step; return the copies to make.

        Args:
            tokens: number of new rows kept, at most its AR.
            evicted: number of oldest tokens dropped; at most `tokens` and at most `length`.
        """

    def rewind(self, tokens: int) -> Sequence[Move]:
        """Drop the `tokens` newest; return the copies to make."""

    def drop(self, ages: Sequence[int]) -> Sequence[Move]:
        """Drop the tokens of these ages, ascending; return the copies to make."""

    def reset(self, length: int = 0) -> None:
        """Drop all tokens, then make room for `length` others (at most S), whose rows the caller writes."""

    def held_rows(self) -> list[int]:
        """The arena rows of the tokens held, oldest token first."""


def moves_of(
    src_rows: Sequence[int], dst_rows: Sequence[int], *, src: Place = "arena", dst: Place = "arena"
) -> list[Move]:
    """Copy rows, with one move per run of neighbouring rows."""
    moves = []
    start = 0
    for i in range(1, len(src_rows) + 1):
        if (
            i == len(src_rows)
            or src_rows[i] - src_rows[start] != i - start
            or dst_rows[i] - dst_rows[start] != i - start
        ):
            moves.append(Move(src_rows[start], dst_rows[start], i - start, src, dst))
            start = i
    return moves


def close_gaps(first_row: int, ages: Sequence[int]) -> list[Move]:
    """Drop tokens stored in neighbouring rows: tokens older than a gap move up to close it, the newest first.

    Args:
        first_row: the row of the oldest token, whose age is 0.
        ages: the tokens to drop, ascending.
    """
    moves = []
    for i in reversed(range(len(ages))):
        start = ages[i - 1] + 1 if i else 0
        if rows := ages[i] - start:
            moves.append(Move(first_row + start, first_row + start + len(ages) - i, rows))
    return moves
