"""An endless generation in integers: a strategy let run under the policy sliding-window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgekv.kv import Move, SlidingWindow, Strategy, Window


class Run:
    """Lets a strategy run and counts the rows that it asks to copy in each of the N tensors.

    Attributes:
        capacity: tokens held once the context is full, S-1.
    """

    def __init__(self, strategy: Strategy, context: int) -> None:
        self._strategy = strategy
        self._context = context
        self.capacity = SlidingWindow().capacity(context)

    def prepare(self, ar: int) -> int:
        """Make a step with the AR-`ar` graph possible; rows copied before it."""
        return _rows(self._strategy.prepare(ar, self._context - ar))

    def window(self, ar: int) -> Window:
        """What that step sees."""
        return self._strategy.window(ar, self._context - ar)

    def commit(self, tokens: int) -> int:
        """Keep the step's first new rows; rows copied after it."""
        evicted = max(0, self._strategy.length + tokens - self.capacity)
        return _rows(self._strategy.commit(tokens, evicted))

    def fill(self, ar: int) -> Iterator[tuple[Window, int]]:
        """Step by step with the AR-`ar` graph, a token each, until the context is full: window and rows copied."""
        for _ in range(self.capacity):
            yield self._step(ar)

    def period(self, ar: int) -> Iterator[tuple[Window, int]]:
        """Likewise once the context is full, until the first window comes back; that step is the last.

        The window is all that a step of a full cache sees, so when it returns, all that follows repeats.
        """
        start, _ = first = self._step(ar)
        yield first
        most_tokens = 8 * max(self._context, self._strategy.rows)
        for _ in range(most_tokens):
            step = self._step(ar)
            yield step
            if step[0] == start:
                return
        raise ValueError(f"strategy: got no period within {most_tokens} tokens; expected a window that returns")

    def prompt(self, ar: int) -> list[int]:
        """Rows copied by each step of a prompt as long as the capacity, into an empty cache."""
        starts = range(0, self.capacity, ar)
        return [self.prepare(ar) + self.commit(min(ar, self.capacity - start)) for start in starts]

    def _step(self, ar: int) -> tuple[Window, int]:
        before = self.prepare(ar)
        window = self.window(ar)
        return window, before + self.commit(1)


def _rows(moves: Sequence[Move]) -> int:
    return sum(move.rows for move in moves) if moves else 0
