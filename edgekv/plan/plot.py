"""A plot of memory held against bytes copied, two marks for each update strategy."""

from __future__ import annotations

from fractions import Fraction
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.errors import UsageError
from edgekv.kv import StrategyName
from edgekv.plan.cache import Choice, StrategyCost, strategy_cost
from edgekv.plan.size import SizeReport
from edgekv.plan.subject import cache_geometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg", ".pdf")
_SHIFT: StrategyName = "pointer-shift"
_FURTHER_RESERVES = (Fraction(5, 4), Fraction(7, 4))
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#c78c06")
_INK = "#444444"
_KIB, _MIB = 1 << 10, 1 << 20


def save_plot(report: SizeReport, file: Path) -> None:
    """Draw each strategy's memory (MiB) over its copied bytes per token (KiB), while filling and once full.

    Args:
        report: what to draw.
        file: target file; its suffix selects the format: .png, .svg or .pdf.

    Raises:
        UsageError: another suffix, a folder that does not exist, or matplotlib is not installed.
    """
    if file.suffix.lower() not in _FORMATS:
        wanted = f"a name that ends in {', '.join(_FORMATS)}"
        raise UsageError("--plot", got=str(file), expected=wanted, fix="Use --plot FILE.png.")
    if not file.parent.is_dir():
        raise UsageError(
            "--plot", got=f"no folder {file.parent}", expected="a folder that exists", fix="Make it first."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "Install it with `pip install matplotlib`."
        raise UsageError("--plot", got="no matplotlib", expected="matplotlib", fix=fix) from None
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
    most_kib = max(2 * row_kib, *(size.sliding_bytes_per_token / _KIB for size in report.strategies))
    # A logarithmic axis has no 0, which some strategies reach.
    axes.set_xscale("symlog", base=2, linthresh=row_kib)
    axes.set_xlim(-0.15 * row_kib, most_kib * 2 ** (2 + log2(most_kib / row_kib) / 5))
    axes.set_ylim(0, 1.4 * max(size.held_bytes for size in report.strategies) / _MIB)
    axes.set_xticks(_ticks(row_kib, most_kib))
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
    geometry = cache_geometry(g.layers, g.kv_heads, g.head_dim, g.context, g.kv_dtype, _windows(report))
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


def _ticks(row_kib: float, most_kib: float) -> list[float]:
    """0, half a row, and then rows in powers of 2, or of 4 or more if there would be too many ticks."""
    powers = list(range(int(log2(most_kib / row_kib)) + 2))
    return [0, row_kib / 2, *(row_kib * 2**power for power in powers[:: 1 + len(powers) // 8])]


def _span(filling_kib: float, sliding_kib: float) -> str:
    low, high = _number(filling_kib), _number(sliding_kib)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
