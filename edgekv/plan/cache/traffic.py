"""What an update strategy copies, counted by letting it run in integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from edgekv.kv import Strategy
from edgekv.plan.cache.run import Run


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
    run = Run(make(), context)
    filling = [rows for _, rows in run.fill(1)]
    steps = run.period(1)
    last, first = next(steps)
    period: list[int] = []
    moving_ends = 0
    for window, rows in steps:
        period.append(rows)
        moving_ends = max(moving_ends, (window.past_row != last.past_row) + (window.new_row != last.new_row))
        last = window
    further = run.prepare(max_ar) + run.commit(max_ar)
    prompt = Run(make(), context).prompt(max_ar)
    decoded = [*filling, first, *period]
    return Traffic(
        tokens_before_copy=next((token for token, rows in enumerate(decoded) if rows), None),
        filling_rows_per_token=Fraction(sum(filling), len(filling)),
        sliding_rows_per_token=Fraction(sum(period), len(period)),
        worst_step_rows=max(*decoded, *prompt, further),
        moving_ends=moving_ends,
    )


def count_windows(make: Callable[[], Strategy], *, context: int, ar: int) -> int:
    """At how many rows the past and the new rows of the AR-`ar` graph begin, together, in an endless generation.

    A runtime that registers each address of a graph's input or output as a tensor of its own registers so many for
    each cache tensor. Any number of tokens may be held when a step begins, so the graph is run at every one: AR
    tokens computed, one kept.

    Args:
        make: makes the strategy, empty.
        context: S.
        ar: tokens per inference of the graph.
    """
    run = Run(make(), context)
    past_rows, new_rows = set(), set()
    for steps in (run.fill(ar), run.period(ar)):
        for window, _ in steps:
            past_rows.add(window.past_row)
            new_rows.add(window.new_row)
    return len(past_rows) + len(new_rows)
