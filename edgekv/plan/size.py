"""The report of the command `size`, and its figure."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from devices import Device
from edgekv.errors import UsageError
from edgekv.kv import StrategyName
from edgekv.plan.cache import (
    CHOICES,
    Choice,
    GraphPorts,
    Recommendation,
    StrategyCost,
    estimate,
    graph_ports,
    recommend,
    strategy_cost,
)
from edgekv.plan.fit import Demand, Fit, MemoryLimit, check_cache_type, demand, fit
from edgekv.plan.parts import EncoderPlan
from edgekv.plan.subject import Subject, cache_geometry
from edgekv.plan.wording import fit_sentences
from edgekv.spec import Geometry, KeyLayout, KvDtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class LayersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend to the same number of tokens.

    Attributes:
        layers: number of layers.
        window: tokens that they attend to, including the new one.
        tensors: cache tensors of these layers.
    """

    layers: int
    window: int
    tensors: int


class GeometryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the cache; `tensors` is N = layers x 2 x kv_heads."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    kv_bits: int
    kv_dtype: KvDtype
    key_layout: KeyLayout
    tensors: int
    windows: list[LayersRecord]

    @classmethod
    def of(cls, geometry: Geometry) -> GeometryRecord:
        rows = geometry.rows()
        return cls(
            layers=geometry.layers,
            kv_heads=rows[0].kv_heads,
            head_dim=rows[0].head_dim,
            context=geometry.context,
            kv_bits=8 * rows[0].element_bytes,
            kv_dtype=geometry.kv_dtype,
            key_layout=rows[0].key_layout,
            tensors=geometry.tensors,
            windows=[LayersRecord(layers=group.layers, window=group.window, tensors=group.tensors) for group in rows],
        )


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a cache.

    Attributes:
        summary: whether it fits, in words, if a device or a limit was given.
        source: source of the sizes.
        device: part number of the device, if one was named.
        fit: whether it fits with the default strategy, if a device or a limit was given.
        demand: bytes that this strategy needs.
        geometry: the sizes.
        ar: tokens per inference of the graphs that decode and prefill.
        textbook_bytes: keys and values of S tokens by the textbook formula.
        strategies: the cost of each update strategy, the default first.
        recommendation: the strategy to choose.
        graphs: inputs and outputs of each graph.
        encoder: of pictures, in an HTP context of its own; None if the model reads text alone.
        max_positions: the model's maximum context, if known.
        assumptions: assumed values that were not given.
    """

    summary: str | None
    source: str
    device: str | None
    fit: Fit | None
    demand: Demand | None
    geometry: GeometryRecord
    ar: list[int]
    textbook_bytes: int
    strategies: list[StrategyCost]
    recommendation: Recommendation
    graphs: list[GraphPorts]
    encoder: EncoderPlan | None
    max_positions: int | None
    assumptions: list[str]


def make_size_report(subject: Subject, *, device: Device | None = None, limit: MemoryLimit | None = None) -> SizeReport:
    """Size a cache, and say whether it fits if a device or a limit is given.

    Args:
        subject: what to size.
        device: the target; its HTP must support the cache's type.
        limit: memory for weights, cache and activations; with a device and no limit, that of HTP contexts.

    Raises:
        UsageError: the device does not support the cache's type.
    """
    geometry = subject.geometry
    if device is not None:
        check_cache_type(geometry, device)
        limit = limit or MemoryLimit.of_htp()
    choices = CHOICES
    costs = [strategy_cost(choice, geometry, subject.steps) for choice in choices]
    needed, memory_fit, summary = None, None, None
    if limit is not None:
        fits = [fit(subject, choice, limit) for choice in choices]
        costs = [
            msgspec.structs.replace(cost, fits=choice_fit.fits, largest_context=choice_fit.largest_context)
            for cost, choice_fit in zip(costs, fits, strict=True)
        ]
        needed, memory_fit = demand(subject, choices[0], limit), fits[0]
        others = [
            f"--kv-update {choice.label}" for choice, choice_fit in zip(choices, fits, strict=True) if choice_fit.fits
        ]
        summary = " ".join(fit_sentences(subject, choices[0], device, needed, memory_fit, others))
    record = GeometryRecord.of(geometry)
    return SizeReport(
        summary=summary,
        source=subject.source,
        device=None if device is None else device.soc,
        fit=memory_fit,
        demand=needed,
        geometry=record,
        ar=list(subject.ar),
        textbook_bytes=estimate(
            layers=record.layers,
            kv_heads=record.kv_heads,
            head_dim=record.head_dim,
            tokens=record.context,
            element_bytes=record.kv_bits // 8,
        ),
        strategies=costs,
        recommendation=recommend(costs),
        graphs=[graph_ports(geometry, role, ar, subject.rotary) for role, ar in subject.graphs],
        encoder=None if subject.encoder is None else EncoderPlan.of(subject.encoder),
        max_positions=subject.max_positions,
        assumptions=list(subject.assumptions),
    )


_FORMATS = (".png", ".svg", ".pdf")
_SHIFT: StrategyName = "pointer-shift"
_FURTHER_RESERVES = (Fraction(5, 4), Fraction(7, 4))
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c78c06")
_INK = "#444444"
_KIB, _MIB = 1 << 10, 1 << 20


def check_plot(file: Path) -> None:
    """Raise what `save_plot` would, before anything is read.

    Raises:
        UsageError: another suffix, a folder that does not exist, or matplotlib is not installed.
    """
    if file.suffix.lower() not in _FORMATS:
        expected = f"a name that ends in {', '.join(_FORMATS)}"
        raise UsageError("--plot", got=str(file), expected=expected, fix="Use --plot FILE.png.")
    if not file.parent.is_dir():
        raise UsageError(
            "--plot", got=f"no folder {file.parent}", expected="a folder that exists", fix="Make it first."
        )
    if find_spec("matplotlib") is None:
        fix = "Install it with `pip install matplotlib`."
        raise UsageError("--plot", got="no matplotlib", expected="matplotlib", fix=fix)


def save_plot(report: SizeReport, file: Path) -> None:
    """Draw each strategy's memory (MiB) over its copied bytes per token (KiB), while filling and once full.

    Args:
        report: what to draw.
        file: target file; its suffix selects the format: .png, .svg or .pdf.

    Raises:
        UsageError: as `check_plot`.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    _draw(figure.add_subplot(), report)
    figure.savefig(file)


def _draw(axes: Axes, report: SizeReport) -> None:
    names = list(dict.fromkeys(size.strategy for size in report.strategies))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    _draw_reserves(axes, report, colours[_SHIFT])
    above_bytes: list[int] = []
    for size in report.strategies:
        # Labels of marks at the same height would overlap.
        below = any(abs(size.held_bytes - held) < max(above_bytes) / 8 for held in above_bytes)
        if not below:
            above_bytes.append(size.held_bytes)
        _draw_size(axes, size, colours[size.strategy], below=below)
    _draw_recommended(axes, report)
    axes.plot([], [], "o", color=_INK, markerfacecolor="white", label="mean while the context fills")
    axes.plot([], [], "o", color=_INK, label="mean once it is full and slides")
    g = report.geometry
    row_kib = g.tensors * g.head_dim * g.kv_bits / 8 / _KIB
    max_kib = max(2 * row_kib, *(size.sliding_bytes_per_token / _KIB for size in report.strategies))
    # A logarithmic axis has no 0, which some strategies reach.
    axes.set_xscale("symlog", base=2, linthresh=row_kib)
    axes.set_xlim(-0.15 * row_kib, max_kib * 2 ** (2 + log2(max_kib / row_kib) / 5))
    axes.set_ylim(0, 1.4 * max(size.held_bytes for size in report.strategies) / _MIB)
    axes.set_xticks(_ticks(row_kib, max_kib))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda kib, _: _number(kib))
    axes.yaxis.set_major_formatter(lambda mib, _: _number(mib))
    axes.set_xlabel(f"copied per token (KiB, logarithmic from {_number(row_kib)} on: one row of every tensor)")
    axes.set_ylabel("held by the cache (MiB)")
    axes.set_title(
        f"KV cache of {g.layers} layers, {g.kv_heads} kv heads, head_dim {g.head_dim}, {g.kv_bits} bits, "
        f"context {g.context:,}",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _draw_size(axes: Axes, size: StrategyCost, colour: str, *, below: bool) -> None:
    held_mib = size.held_bytes / _MIB
    filling_kib, sliding_kib = size.filling_bytes_per_token / _KIB, size.sliding_bytes_per_token / _KIB
    axes.plot([filling_kib, sliding_kib], [held_mib, held_mib], color=colour, linewidth=1.2, alpha=0.6)
    axes.plot([filling_kib], [held_mib], "o", color=colour, markersize=8, markerfacecolor="white", zorder=3)
    axes.plot([sliding_kib], [held_mib], "o", color=colour, markersize=8, zorder=4)
    axes.annotate(
        f"{size.label}\n{held_mib:,.1f} MiB, {_span(filling_kib, sliding_kib)} KiB per token",
        (sliding_kib, held_mib),
        xytext=(0, -12) if below else (10, 7),
        horizontalalignment="left",
        verticalalignment="top" if below else "bottom",
        textcoords="offset points",
        color=colour,
        fontsize=9,
    )


def _draw_reserves(axes: Axes, report: SizeReport, colour: str) -> None:
    """The line of all reserves of pointer-shift once the context is full."""
    g = report.geometry
    sizes = g.layers, g.kv_heads, g.head_dim, g.context
    geometry = cache_geometry(*sizes, g.kv_dtype, g.key_layout, windows=_windows(report))
    points = [(s.sliding_bytes_per_token, s.held_bytes) for s in report.strategies if s.strategy == _SHIFT]
    for choice in (Choice(_SHIFT, reserve) for reserve in _FURTHER_RESERVES):
        cost = strategy_cost(choice, geometry, report.ar)
        points.append((cost.sliding_bytes_per_token, cost.held_bytes))
    copied, held = zip(*sorted(points), strict=True)
    axes.plot(
        [c / _KIB for c in copied],
        [h / _MIB for h in held],
        ":",
        color=colour,
        label=f"{_SHIFT}, any reserve from 1.25 to 2, full",
    )


def _draw_recommended(axes: Axes, report: SizeReport) -> None:
    best = report.recommendation
    (size,) = (s for s in report.strategies if (s.strategy, s.reserve) == (best.strategy, best.reserve))
    on = "" if report.device is None else f" on {report.device}"
    axes.plot(
        [size.sliding_bytes_per_token / _KIB],
        [size.held_bytes / _MIB],
        "o",
        color=_INK,
        markersize=16,
        markerfacecolor="none",
        linestyle="none",
        label=f"recommended{on}",
    )


def _windows(report: SizeReport) -> tuple[int | None, ...]:
    """The windows by layer; which layer has which does not change the cost."""
    groups = report.geometry.windows
    return tuple(group.window for group in groups for _ in range(group.layers)) if len(groups) > 1 else ()


def _ticks(row_kib: float, max_kib: float) -> list[float]:
    """0, half a row, and then rows in powers of 2, or of 4 or more if there would be too many ticks."""
    powers = list(range(int(log2(max_kib / row_kib)) + 2))
    return [0, row_kib / 2, *(row_kib * 2**power for power in powers[:: 1 + len(powers) // 8])]


def _span(filling_kib: float, sliding_kib: float) -> str:
    low, high = _number(filling_kib), _number(sliding_kib)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
