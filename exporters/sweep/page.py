"""Renders the report of a sweep as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from edgekv.bundle import atomic_file
from edgekv.system import format_bytes
from exporters.inspect.page.charts import LineChart, Point, Series, Tick
from exporters.inspect.show import number
from exporters.sweep.result import Result, SweepReport

_WIDTH, _HEIGHT = 960, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 14, 44
_ERRORS_OF = "activation"


@dataclass(frozen=True, slots=True)
class Dot:
    """A combination in the chart, in SVG user units.

    Attributes:
        x: of its bytes.
        y: of its KL divergence.
        on_front: whether it is on the Pareto front.
        chosen: whether it is recommended.
        title: of its tooltip.
        kind: number of its recipe.
    """

    x: float
    y: float
    on_front: bool
    chosen: bool
    title: str
    kind: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Quality against bytes of the combinations for a chip; the axis of quality is logarithmic."""

    device: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    dots: Sequence[Dot]
    front: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]

    @classmethod
    def of(cls, device: str, results: Sequence[Result], recipes: Sequence[str], chosen: set[str]) -> Scatter:
        """The combinations of a chip."""
        sizes = [each.bytes / 1e6 for each in results]
        losses = [math.log10(max(each.evaluation.kl_nats, 1e-9)) for each in results]
        low_x, high_x = _widened(min(sizes), max(sizes))
        low_y, high_y = _widened(min(losses), max(losses))
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

        def x(value: float) -> float:
            return round(_LEFT + (value - low_x) / (high_x - low_x) * (right - _LEFT), 1)

        def y(value: float) -> float:
            return round(bottom - (value - low_y) / (high_y - low_y) * (bottom - _TOP), 1)

        dots = [
            Dot(
                x(size),
                y(loss),
                each.on_front,
                each.name in chosen,
                f"{each.name}: {format_bytes(each.bytes)}, {each.evaluation.kl_nats:.5f} nats a token",
                recipes.index(each.recipe),
            )
            for each, size, loss in zip(results, sizes, losses, strict=True)
        ]
        front = sorted((dot.x, dot.y) for dot in dots if dot.on_front)
        steps = [low_x + (high_x - low_x) * part / 5 for part in range(6)]
        levels = [low_y + (high_y - low_y) * part / 5 for part in range(6)]
        return cls(
            device=device,
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
            right=right,
            top=_TOP,
            bottom=bottom,
            dots=dots,
            front=" ".join(f"{a},{b}" for a, b in front),
            x_ticks=[Tick(x(step), f"{step:.4g}") for step in steps],
            y_ticks=[Tick(y(level), f"{10**level:.2g}") for level in levels],
        )


def write_page(file: Path, report: SweepReport) -> None:
    """Write the page; it appears atomically and replaces an earlier one."""
    with atomic_file(file) as partial:
        partial.write_text(render_page(report), "utf-8")


def render_page(report: SweepReport) -> str:
    """The page as text."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("exporters.sweep", "."), PackageLoader("exporters.inspect.page", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "number": number}
    recipes = [*dict.fromkeys(each.recipe for each in report.results)]
    chosen = {each.name for each in report.recommended if each.name is not None}
    by_device: dict[str, list[Result]] = {}
    for each in report.results:
        by_device.setdefault(each.device, []).append(each)
    return environment.get_template("page.html.j2").render(
        report=report,
        style=resources.files("exporters.inspect.page").joinpath("style.css").read_text("utf-8"),
        recipes=recipes,
        chosen=chosen,
        scatters=[Scatter.of(device, results, recipes, chosen) for device, results in by_device.items()],
        errors=_errors(report.results),
    )


def _errors(results: Sequence[Result]) -> LineChart | None:
    """Mean SQNR of each layer's activations; chips have the same, so one line for each other choice."""
    series: dict[str, Series] = {}
    for each in results:
        name = each.name.replace(f"-{each.device}", "")
        points = [
            Point(int(loss.place), loss.levels[_ERRORS_OF].mean_db, f"{name}, layer {loss.place}")
            for loss in each.layers
            if loss.place.isdecimal() and _ERRORS_OF in loss.levels
        ]
        series.setdefault(name, Series(name, points))
    found = [each for each in series.values() if each.points]
    return LineChart.of(found) if found else None


def _widened(low: float, high: float) -> tuple[float, float]:
    room = max((high - low) * 0.08, abs(high) * 0.01, 1e-6)
    return low - room, high + room
