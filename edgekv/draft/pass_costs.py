"""What a pass costs, by its rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SAMPLES = 31
_MANY = 8
_PATIENCE = 256
_MOST_PATIENCE = 4096
_COST_OF_A_ROW = 1 / 64
"""Of a pass of one row; assumed of a graph that has not run yet. 8 to 16 rows cost an NPU some 1.1 to 1.2 passes."""


@dataclass(slots=True)
class _Graph:
    """Passes of one size.

    Attributes:
        samples_ns: of the last passes.
        ns: what is expected; None before it was measured.
        has_loaded: whether it has run before: the first pass also loads the graph.
        last: number of the last pass.
        patience: passes of other graphs after which its cost is forgotten.
    """

    samples_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    ns: float | None = None
    has_loaded: bool = False
    last: int = 0
    patience: int = _PATIENCE

    def add(self, ns: int) -> None:
        if not self.has_loaded:
            self.has_loaded = True
            return
        self.samples_ns.append(ns)
        self.ns = sorted(self.samples_ns)[(len(self.samples_ns) - 1) // 4]
        if len(self.samples_ns) >= _MANY:
            self.patience = _PATIENCE

    def forget(self) -> None:
        self.samples_ns.clear()
        self.ns = None
        self.patience = min(2 * self.patience, _MOST_PATIENCE)


class PassCosts:
    """Lower quartiles of the last passes of each size, which all texts of a model share.

    On a busy machine more than half of the long passes can be interrupted, and few of the short ones.
    More rows never cost less: where a size seems to, the smaller one was disturbed, and is tried again.
    The cost of a size that has not run for 256 passes is forgotten, so that it is tried again; for twice as many if it
    then runs only a few times, and so on up to 4,096.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._graphs: dict[int, _Graph] = {}
        self._passes = 0

    def add(self, rows: int, ns: int) -> None:
        """Count a pass of a graph of this many rows. The first one of each size does not count: it loads the graph."""
        self._passes += 1
        graph = self._graphs.setdefault(rows, _Graph())
        graph.last = self._passes
        graph.add(ns)

    def ns(self, rows: int) -> float:
        """Time of a pass; if it is not known, what can be hoped for from passes of fewer and of more rows."""
        known_ns = self._measured_ns(rows)
        larger = [(more, ns) for more in sorted(self._graphs) if more > rows and (ns := self._measured_ns(more))]
        if known_ns is not None and (rows == 1 or all(known_ns <= ns for _, ns in larger)):
            return known_ns
        step_ns = self._measured_ns(1) or 1.0
        if larger:
            more, ns = larger[0]
            return step_ns + max(ns - step_ns, 0) * (rows - 1) / (more - 1)
        return step_ns * (1 + (rows - 1) * _COST_OF_A_ROW)

    def _measured_ns(self, rows: int) -> float | None:
        graph = self._graphs.get(rows)
        if graph is not None and graph.ns is not None and rows != 1 and self._passes - graph.last >= graph.patience:
            graph.forget()
        return None if graph is None else graph.ns
