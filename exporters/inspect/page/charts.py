"""Geometry of the page's charts, in SVG user units; the templates draw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40


@dataclass(frozen=True, slots=True)
class Point:
    """A value in data units, with the text of its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Tick:
    """A position along an axis, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A drawn line: its points as SVG takes them, and a dot for each."""

    name: str
    path: str
    dots: Sequence[Point]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a numeric axis."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]

    @classmethod
    def of(cls, series: Sequence[Series], height: int = 280) -> LineChart:
        """Fit axes around the points of at least one series; empty series are left out."""
        series = [line for line in series if line.points]
        xs = [point.x for line in series for point in line.points]
        ys = [point.y for line in series for point in line.points]
        low_x, high_x = min(xs), max(max(xs), min(xs) + 1)
        step = round_step(max(ys) - min(ys), 6)
        low_y, high_y = step * math.floor(min(ys) / step), step * math.ceil(max(max(ys), min(ys) + step) / step)
        right, bottom = WIDTH - _RIGHT, height - _BOTTOM

        def place(point: Point) -> Point:
            x = _LEFT + (point.x - low_x) / (high_x - low_x) * (right - _LEFT)
            y = bottom - (point.y - low_y) / (high_y - low_y) * (bottom - _TOP)
            return Point(round(x, 1), round(y, 1), point.title)

        every = max(1, round(round_step(high_x - low_x, 15)))
        columns = range(math.ceil(low_x), math.floor(high_x) + 1)
        rows = [low_y + step * i for i in range(round((high_y - low_y) / step) + 1)]
        placed = [[place(point) for point in line.points] for line in series]
        return cls(
            width=WIDTH,
            height=height,
            left=_LEFT,
            right=right,
            top=_TOP,
            bottom=bottom,
            x_ticks=[Tick(place(Point(x, low_y, "")).x, str(x)) for x in columns if x % every == 0],
            y_ticks=[Tick(place(Point(low_x, y, "")).y, f"{y:g}") for y in rows],
            lines=[
                Line(line.name, " ".join(f"{dot.x},{dot.y}" for dot in dots), dots)
                for line, dots in zip(series, placed, strict=True)
            ],
        )


def round_step(span: float, most: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that divides a span into at most `most` parts."""
    rough = max(span, 1e-9) / most
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval within 0 to 100 % of a track."""

    start: float
    width: float

    @classmethod
    def of(cls, interval: tuple[float, float], track: tuple[float, float]) -> Bar:
        """The part of an interval within a track, both in data units; at least 0.3 % wide, to be seen."""
        scale = 100 / max(track[1] - track[0], 1e-30)
        start, stop = (min(max((end - track[0]) * scale, 0), 100) for end in interval)
        width = max(stop - start, 0.3)
        return cls(round(min(start, 100 - width), 2), round(width, 2))


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of a treemap."""

    name: str
    kind: str
    amount: int
    x: float
    y: float
    width: float
    height: float


def treemap(items: Sequence[tuple[str, str, int]], width: float = WIDTH, height: float = 300) -> list[Tile]:
    """Tiles whose areas are as the amounts of (name, kind, amount), largest first, as square as they can be.

    Squarified treemaps: Bruls, Huizing, van Wijk (2000).
    """
    waiting = sorted((item for item in items if item[2] > 0), key=lambda item: -item[2])
    total = sum(amount for _, _, amount in waiting)
    area, x, y = width * height / max(total, 1), 0.0, 0.0
    tiles: list[Tile] = []
    while waiting:
        side = min(width, height)
        count = next(
            (
                n
                for n in range(1, len(waiting))
                if _worst_ratio(waiting[: n + 1], side, area) > _worst_ratio(waiting[:n], side, area)
            ),
            len(waiting),
        )
        row, waiting = waiting[:count], waiting[count:]
        depth = sum(amount for _, _, amount in row) * area / side
        along = 0.0
        for name, kind, amount in row:
            length = amount * area / depth
            place = (x, y + along, depth, length) if width >= height else (x + along, y, length, depth)
            tiles.append(Tile(name, kind, amount, *(round(extent, 2) for extent in place)))
            along += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
    return tiles


def _worst_ratio(row: Sequence[tuple[str, str, int]], side: float, area: float) -> float:
    """The largest ratio of length to width among the tiles of a row along `side`."""
    areas = [amount * area for _, _, amount in row]
    total = sum(areas)
    return max(max(side**2 * one_area / total**2, total**2 / (side**2 * one_area)) for one_area in areas)
