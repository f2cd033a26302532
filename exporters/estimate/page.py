"""Renders an estimate as one self-contained HTML page, beside that of a second bundle if one is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgekv.plan.estimate import Estimate, GraphEstimate, compared
from exporters.estimate.estimate import ScheduledEstimate
from exporters.htp.schedule import UNITS, Event
from exporters.inspect.page import write_html
from exporters.inspect.page.template import find_template

GENERATOR = "edgekv estimate"
_WIDTH, _LEFT, _LANE = 960, 66, 18
_SHOWN = 24
_COLORS = {
    "attention": 1,
    "feed-forward": 2,
    "embedding": 3,
    "head": 4,
    "norms": 5,
    "convolution": 7,
    "delta rule": 7,
    "layer inputs": 3,
}
_GREY = 6


@dataclass(frozen=True, slots=True)
class Box:
    """An operation in a timeline, in SVG user units."""

    x: float
    width: float
    part: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread of a unit."""

    name: str
    y: int
    height: int
    boxes: Sequence[Box]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The schedule of a layer, a lane for each thread that works."""

    cycles: int
    width: int
    height: int
    left: int
    lanes: Sequence[Lane]

    @classmethod
    def of(cls, events: Sequence[Event]) -> Timeline | None:
        """The events during a layer; None if there are none."""
        timed = [event for event in events if event.cycles]
        if not timed:
            return None
        first = min(event.start for event in timed)
        last = max(event.start + event.cycles for event in timed)
        scale = (_WIDTH - _LEFT) / (last - first)
        threads = sorted({(UNITS.index(event.unit), event.thread) for event in timed})
        lanes = []
        for number, (unit, thread) in enumerate(threads):
            boxes = [
                Box(
                    round(_LEFT + (event.start - first) * scale, 2),
                    max(0.4, round(event.cycles * scale, 2)),
                    event.part,
                    f"{event.kind}, {event.part}: {event.cycles:,} cycles"
                    + (f", {event.bytes:,} bytes" if event.bytes else ""),
                )
                for event in timed
                if (UNITS.index(event.unit), event.thread) == (unit, thread)
            ]
            name = UNITS[unit] + (f" {thread + 1}" if UNITS[unit] == "HVX" else f" {thread}" if thread else "")
            lanes.append(Lane(name, number * _LANE, _LANE, boxes))
        return cls(last - first, _WIDTH, len(lanes) * _LANE, _LEFT, lanes)


@dataclass(frozen=True, slots=True)
class Row:
    """A graph on a proxy, and the same of the other bundle."""

    graph: GraphEstimate
    other: GraphEstimate | None
    verdict: str
    timeline: Timeline | None
    operations: Sequence[tuple[str, float]]


def write_page(file: Path, simulated: ScheduledEstimate, against: Estimate | None = None) -> None:
    """Write the page; the file appears atomically, and replaces an earlier page.

    Raises:
        UsageError: something else is there, or the file cannot be written.
    """
    write_html(file, render_page(simulated, against), GENERATOR)


def render_page(simulated: ScheduledEstimate, against: Estimate | None = None) -> str:
    """The page as text."""
    estimate = simulated.estimate
    rows = [
        Row(
            graph=graph,
            other=other,
            verdict=verdict,
            timeline=Timeline.of(simulated.layers[graph.graph, graph.proxy]),
            operations=[*graph.operations.items()][:_SHOWN],
        )
        for graph, other, verdict in compared(estimate, against)
    ]
    names = [part for row in rows for graph in (row.graph, row.other) if graph is not None for part in graph.parts]
    names += [event.part for events in simulated.layers.values() for event in events]
    parts = {part: _COLORS.get(part, _GREY) for part in dict.fromkeys(names)}
    return find_template("exporters.estimate", "page.html.j2").render(
        estimate=estimate, against=against, rows=rows, parts=parts
    )
