"""What an update strategy copies, counted by letting it run in integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from edgekv.kv import Move, SlidingWindow, Strategy, Window


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows copied in each of the N tensors, and which ends of a graph move, under the policy sliding-window.

    Attributes:
        tokens_before_copy: tokens generated one by one from an empty cache before the first row is copied; None if
            none ever is.
        filling_rows_per_token: mean over the first S-1 of them.
        sliding_rows_per_token: mean of those after, without end.
        worst_step_rows: the most that one step copies: in a prompt that fills the context in steps of the largest
            AR, in tokens generated one by one, or in one more step of the largest AR after them.
        moving_ends: of the graph inputs and outputs of one tensor, how many change their address from one decode
            step to the next: 0 to 2.
    """

    tokens_before_copy: int | None
    filling_rows_per_token: Fraction
    sliding_rows_per_token: Fraction
    worst_step_rows: int
    moving_ends: int


def measure_traffic(make: Callable[[], Strategy], *, context: int, max_ar: int) -> Traffic:
    """Run a strategy through one period of an endless generation.

    Args:
        make: makes the strategy, empty.
        context: S.
        max_ar: the largest AR of its graphs.
    """
    run = _Run(make(), SlidingWindow().capacity(context))
    filling = [run.prepare(1) + run.commit(1) for _ in range(run.capacity)]
    first = run.prepare(1)
    start = run.window(1)
    first += run.commit(1)
    period, moving_ends = _period(run, start, 8 * context)
    decoded = [*filling, first, *period]
    further = run.prepare(max_ar) + run.commit(max_ar)
    prompt = _Run(make(), run.capacity).prompt(max_ar)
    return Traffic(
        tokens_before_copy=next((token for token, rows in enumerate(decoded) if rows), None),
        filling_rows_per_token=Fraction(sum(filling), len(filling)),
        sliding_rows_per_token=Fraction(sum(period), len(period)),
        worst_step_rows=max(*decoded, *prompt, further),
        moving_ends=moving_ends,
    )


def _period(run: _Run, start: Window, most_tokens: int) -> tuple[list[int], int]:
    """Rows copied by each step until the window `start` comes back, and how many ends moved at most between two.

    The window is all that a step of a full cache sees, so when it returns, all that follows repeats.
    """
    copied: list[int] = []
    ends, last = 0, start
    while len(copied) < most_tokens:
        rows = run.prepare(1)
        window = run.window(1)
        copied.append(rows + run.commit(1))
        ends = max(ends, (window.past_row != last.past_row) + (window.new_row != last.new_row))
        if window == start:
            return copied, ends
        last = window
    raise ValueError(f"strategy: found no period within {most_tokens} tokens; wanted a window that returns")


class _Run:
    """A strategy under the policy sliding-window; counts the rows that it asks to copy in each tensor."""

    def __init__(self, strategy: Strategy, capacity: int) -> None:
        self._strategy = strategy
        self.capacity = capacity

    def prepare(self, ar: int) -> int:
        return _rows(self._strategy.prepare(ar))

    def window(self, ar: int) -> Window:
        return self._strategy.window(ar)

    def commit(self, tokens: int) -> int:
        evicted = max(0, self._strategy.length + tokens - self.capacity)
        return _rows(self._strategy.commit(tokens, evicted))

    def prompt(self, ar: int) -> list[int]:
        """By each step of a prompt as long as the capacity."""
        starts = range(0, self.capacity, ar)
        return [self.prepare(ar) + self.commit(min(ar, self.capacity - start)) for start in starts]


def _rows(moves: Sequence[Move]) -> int:
    return sum(move.rows for move in moves) if moves else 0
