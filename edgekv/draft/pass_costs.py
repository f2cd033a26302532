"""What a pass costs, by its rows."""

from __future__ import annotations

from collections import deque
from statistics import median

_SAMPLES = 31
_WARM_UP = 1
"""Passes of a graph that are not counted: the first one loads it."""
_COST_OF_A_ROW = 1 / 64
"""Of a pass of one row; assumed of a graph that has not run yet. 8 to 16 rows cost an NPU some 1.1 to 1.2 passes."""


class PassCosts:
    """Medians of the last passes, which all texts of a model share."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._samples: dict[int, deque[int]] = {}
        self._medians: dict[int, float] = {}
        self._left_out: dict[int, int] = {}

    def add(self, rows: int, ns: int) -> None:
        """Count a pass of a graph of this many rows."""
        if self._left_out.setdefault(rows, 0) < _WARM_UP:
            self._left_out[rows] += 1
            return
        samples = self._samples.setdefault(rows, deque(maxlen=_SAMPLES))
        samples.append(ns)
        self._medians[rows] = median(samples)

    def ns(self, rows: int) -> float:
        """Time of a pass; what can be hoped for if it was not measured."""
        return self._medians[rows] if rows in self._medians else self.hoped_ns(rows)

    def hoped_ns(self, rows: int) -> float:
        """Time of a pass where rows cost little, from that of one row; in its units if that was not measured."""
        return self._medians.get(1, 1.0) * (1 + (rows - 1) * _COST_OF_A_ROW)
