"""Renders the report of a sweep as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import format_bytes
from edgekv.plan.estimate import EQUAL_SHARE
from exporters.inspect.page.charts import LineChart, Point, Series, Tick, round_step
from exporters.inspect.page.template import find_template
from exporters.sweep.result import Result, SweepReport

_WIDTH, _HEIGHT = 960, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 14, 44
_ERRORS_OF = "activation"
_COLORS = (1, 2, 3, 4, 5, 7)  # of the style; 6 is grey
_MIN_KL = 1e-9  # nats
_MAX_LEVELS = 10
_LARGEST_DOT = 14.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A combination in the chart, in SVG user units.

    Attributes:
        x: of its bytes.
        y: of its KL divergence.
        on_front: whether no other is better in fewer bytes.
        chosen: whether it is recommended.
        title: of its tooltip.
        kind: number of its recipe.
        radius: by its bytes, where these are no axis.
    """

    x: float
    y: float
    on_front: bool
    chosen: bool
    title: str
    kind: int
    radius: float = 6.0


@dataclass(frozen=True, slots=True)
class Scatter:
    """Quality, on a logarithmic axis, against bytes or speed of the combinations for chips that differ in neither."""

    devices: str
    label: str
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
    def of_bytes(
        cls, devices: Sequence[str], results: Sequence[Result], recipes: Sequence[str], chosen: set[str]
    ) -> Scatter:
        """Against bytes: the combinations of the first of these chips, and the front."""
        front = {result.name for result in results if result.on_front}
        sizes = [result.bytes / 1e6 for result in results]
        return cls._of(devices, results, sizes, "bundle, MB", front, recipes, chosen)

    @classmethod
    def of_speed(
        cls, devices: Sequence[str], results: Sequence[Result], recipes: Sequence[str], chosen: set[str]
    ) -> Scatter | None:
        """Against simulated tokens a second of decode, with bytes as areas; None if they are not known.

        On the front, no other has less KL divergence and is as fast, to what the simulation tells apart.
        """
        spans = [(spans, spans.simulated.span("decode")) for spans in results if spans.simulated is not None]
        known = [(result, span[0]) for result, span in spans if span is not None]
        if not known:
            return None
        front = {
            result.name
            for result, speed in known
            if not any(
                other.evaluation.kl_nats < result.evaluation.kl_nats and other_speed > speed * (1 - EQUAL_SHARE)
                for other, other_speed in known
            )
        }
        speeds = [speed for _, speed in known]
        label = "tokens a second, simulated"
        chart = cls._of(devices, [result for result, _ in known], speeds, label, front, recipes, chosen)
        largest = max(result.bytes for result, _ in known)
        areas = (_LARGEST_DOT * math.sqrt(result.bytes / largest) for result, _ in known)
        return replace(chart, dots=[replace(dot, radius=round(r, 1)) for dot, r in zip(chart.dots, areas, strict=True)])

    @classmethod
    def _of(
        cls,
        devices: Sequence[str],
        results: Sequence[Result],
        amounts: Sequence[float],
        label: str,
        on_front: set[str],
        recipes: Sequence[str],
        chosen: set[str],
    ) -> Scatter:
        losses = [_log(result.evaluation.kl_nats) for result in results]
        step = round_step(max(amounts) - min(amounts) or max(amounts), 6)
        low_x, high_x = step * math.floor(min(amounts) / step), step * (math.floor(max(amounts) / step) + 1)
        levels = _levels(10 ** min(losses), 10 ** max(losses))
        low_y, high_y = _log(levels[0]), _log(levels[-1])
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

        def x(value: float) -> float:
            return round(_LEFT + (value - low_x) / (high_x - low_x) * (right - _LEFT), 1)

        def y(value: float) -> float:
            return round(bottom - (value - low_y) / (high_y - low_y) * (bottom - _TOP), 1)

        dots = [
            Dot(
                x(amount),
                y(loss),
                result.name in on_front,
                result.name in chosen,
                _title(result),
                recipes.index(result.recipe),
            )
            for result, amount, loss in zip(results, amounts, losses, strict=True)
        ]
        front = sorted((dot.x, dot.y) for dot in dots if dot.on_front)
        columns = [low_x + step * number for number in range(round((high_x - low_x) / step) + 1)]
        return cls(
            devices=", ".join(devices),
            label=label,
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
            right=right,
            top=_TOP,
            bottom=bottom,
            dots=dots,
            front=" ".join(f"{a},{b}" for a, b in front),
            x_ticks=[Tick(x(column), f"{column:g}") for column in columns],
            y_ticks=[Tick(y(_log(level)), f"{level:g}") for level in levels],
        )


def _title(result: Result) -> str:
    speed = result.simulated_speed("decode")
    simulated = "" if speed == "-" else f", {speed} tokens/s simulated"
    return f"{result.name}: {format_bytes(result.bytes)}, {result.evaluation.kl_nats:.5f} nats a token{simulated}"


def write_page(file: Path, report: SweepReport) -> None:
    """Write the page; it appears atomically and replaces an earlier one."""
    with atomic_file(file) as partial:
        partial.write_text(render_page(report), "utf-8")


def render_page(report: SweepReport) -> str:
    """The page as text."""
    recipes, groups = [*dict.fromkeys(result.recipe for result in report.results)], _by_chips(report.results)
    chosen = {best.name for best in report.recommended if best.name is not None}
    return find_template("exporters.sweep", "page.html.j2").render(
        report=report,
        recipes=recipes,
        colors=_COLORS,
        chosen=chosen,
        scatters=[Scatter.of_bytes(devices, of_devices, recipes, chosen) for devices, of_devices in groups],
        speeds=[
            chart
            for device in dict.fromkeys(result.device for result in report.results)
            if (chart := Scatter.of_speed([device], _of(report.results, device), recipes, chosen)) is not None
        ],
        errors=_errors(report.results),
    )


def _of(results: Sequence[Result], device: str) -> list[Result]:
    return [result for result in results if result.device == device]


def _errors(results: Sequence[Result]) -> LineChart | None:
    """Mean SQNR of each layer's activations; chips have the same, so one line for each other choice."""
    series: dict[str, Series] = {}
    for result in results:
        name = result.name.replace(f"-{result.device}", "")
        points = [
            Point(int(loss.place), loss.levels[_ERRORS_OF].mean_db, f"{name}, layer {loss.place}")
            for loss in result.layers
            if loss.place.isdecimal() and _ERRORS_OF in loss.levels
        ]
        series.setdefault(name, Series(name, points))
    lines = [lines for lines in series.values() if lines.points]
    return LineChart.of(lines) if lines else None


def _by_chips(results: Sequence[Result]) -> list[tuple[list[str], list[Result]]]:
    """The results of each chip; chips whose bundles have the same sizes and quality stand together."""
    by_device: dict[str, list[Result]] = {}
    for result in results:
        by_device.setdefault(result.device, []).append(result)
    groups: dict[object, tuple[list[str], list[Result]]] = {}
    for device, of_device in by_device.items():
        shown = tuple(
            (result.name.replace(f"-{device}", ""), result.bytes, result.evaluation.kl_nats) for result in of_device
        )
        groups.setdefault(shown, ([], of_device))[0].append(device)
    return [*groups.values()]


def _levels(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `low` to above `high`; of many decades powers of ten alone."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    every = [float(f"{factor}e{decade}") for decade in decades for factor in (1, 2, 5)]
    first = max(number for number, level in enumerate(every) if level <= low)
    last = min(number for number, level in enumerate(every) if level > high)
    levels = every[first : last + 1]
    if len(levels) <= _MAX_LEVELS:
        return levels
    return [float(f"1e{decade}") for decade in decades]


def _log(nats: float) -> float:
    return math.log10(max(nats, _MIN_KL))
