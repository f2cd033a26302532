"""Contenders that take turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import TypeVar

from rich.table import Table

T = TypeVar("T")


def by_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 1, first: int = 0
) -> dict[str, list[T]]:
    """What each contender returned, by name and round.

    Args:
        contenders: each call is a turn.
        rounds: in which each has one turn.
        warm_up: further rounds before, whose results do not count.
        first: number of the contender that begins; the next one begins the next round.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    names = [*contenders]
    for number in range(warm_up + rounds):
        start = (first + number) % len(names)
        for name in names[start:] + names[:start]:
            result = contenders[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def turns_table(title: str, times: Mapping[str, Sequence[float]], base: str) -> Table:
    """A row for each contender: the median, the least and the 90th percentile, and the ratio of medians to `base`."""
    table = Table(title=title)
    for column in ("", "median", "least", "90 %", f"x {base}"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in times.items():
        late = quantiles(each, n=10)[-1] if len(each) > 1 else each[0]
        figures = (median(each), min(each), late, median(each) / median(times[base]))
        table.add_row(name, *(f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}" for figure in figures))
    return table
