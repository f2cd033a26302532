"""How far a path can be used when blocks of limited windows are missing from it."""

from __future__ import annotations

from collections.abc import Sequence


def longest_usable(presence: Sequence[Sequence[bool]], windows: Sequence[int], step: int, upper: int) -> int:
    """The largest length up to `upper` at which every limited window lies in blocks that are present.

    Args:
        presence: of each limited group, whether each block of the path is there.
        windows: their attention windows in tokens, the attending token included.
        step: tokens of a block.
        upper: tokens of the path; above the last block's beginning.

    Returns:
        `upper`, or tokens up to the end of a block.
    """
    end = upper
    while True:
        shorter = min((_longest(p, w, step, end) for p, w in zip(presence, windows, strict=True)), default=end)
        if shorter == end:
            return end
        end = shorter


def _longest(present: Sequence[bool], window: int, step: int, end: int) -> int:
    stop = -(-end // step)
    while stop:
        if not present[stop - 1]:
            stop -= 1
            continue
        reached = min(end, stop * step)
        needed = max(0, reached - window + 1) // step
        missing = next((i for i in range(stop - 1, needed - 1, -1) if not present[i]), None)
        if missing is None:
            return reached
        stop = missing
    return 0
