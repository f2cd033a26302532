"""What one step of AR tokens sees of the cache, in integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Where the graph for `ar` new tokens reads and writes each tensor, and which columns count.

    The attention mask of these layers has P + AR columns: P for the past, then AR for the new tokens.

    Attributes:
        ar: tokens per inference of the graph.
        columns: P, the past rows that the graph reads: S-AR, or W-1 of layers whose window W is smaller.
        past_row: first of these rows, as a row of the arena's tensor.
        new_row: row where the first of the AR new rows lands: of the arena's tensor if `in_place`, else of
            the scratch tensor.
        in_place: whether the new rows land where they are kept, so that appending copies nothing.
        first: first valid column of the past.
        stop: one behind the last valid column of the past, at most P.
        leaving: valid columns that the last of the AR new rows does not see, since their tokens have left the window
            of these layers by then, oldest first. Each row before it sees one more of them.
    """

    ar: int
    columns: int
    past_row: int
    new_row: int
    in_place: bool
    first: int
    stop: int
    leaving: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ar < 1 or self.past_row < 0 or self.new_row < 0 or not 0 <= self.first <= self.stop <= self.columns:
            raise ValueError(f"window: got {self}; expected ar >= 1, rows >= 0 and 0 <= first <= stop <= columns")
