"""`edgekv size`: the cost of a KV cache, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from devices import Device
from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.machine.system import format_bytes
from edgekv.option import Argument, Option, OptionGroup, find_device
from edgekv.plan.options import Overrides
from edgekv.plan.wording import encoder_sentence

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgekv.plan import SizeReport
    from edgekv.plan.cache import StrategyCost


@command
def size(
    overrides: Annotated[Overrides, OptionGroup("Sizes")],
    output: Output,
    path: Annotated[
        Path | None, Argument("A config.json, a folder that has one, a GGUF file, a hub id, or a bundle.")
    ] = None,
    device: Annotated[
        Device | None, Option("Say whether it fits this device: part number or name.", parse=find_device)
    ] = None,
    budget_gb: Annotated[
        float | None,
        Option("Memory for weights, cache and activations, in 10^9 bytes.", shown="HTP contexts"),
    ] = None,
    plot: Annotated[Path | None, Option("Plot memory against copied bytes into this .png, .svg or .pdf.")] = None,
) -> None:
    """Sizes come from a config.json, a bundle, or the options."""
    from edgekv.plan import MemoryLimit, check_plot, find_subject, make_size_report, save_plot  # slow to import

    limit = None if budget_gb is None else MemoryLimit.of_option(budget_gb)
    if plot is not None:
        check_plot(plot)
    report = make_size_report(find_subject(path, overrides), device=device, limit=limit)
    if plot is not None:
        save_plot(report, plot)
    if output.as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: SizeReport) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    g, chosen = report.geometry, report.recommendation
    held_bytes = next(
        cost.held_bytes
        for cost in report.strategies
        if (cost.strategy, cost.reserve) == (chosen.strategy, chosen.reserve)
    )
    verdict = f"{format_bytes(held_bytes)} of cache for a context of {g.context:,} tokens, with {chosen.strategy}."
    console.print(" ".join(filter(None, (verdict, report.summary))), end="\n\n")
    console.print(
        f"{g.layers} layers x 2 x {g.kv_heads} kv heads = {g.tensors:,} tensors of head dimension {g.head_dim}, "
        f"context {g.context:,}, {g.kv_bits} bits ({g.kv_dtype}), from {report.source}"
    )
    if len(g.windows) > 1:
        listed = ", ".join(f"{group.layers} layers {group.window:,} tokens" for group in g.windows)
        console.print(f"Attention windows: {listed}")
    console.print(f"Keys and values of {g.context:,} tokens: {report.textbook_bytes:,} bytes by the textbook formula")
    for table in _strategies(report, console):
        console.print(table)
    console.print(f"Choose {report.recommendation.reason}", soft_wrap=True)
    console.print(_graphs(report))
    if report.encoder is not None:
        console.print(encoder_sentence(report.encoder), soft_wrap=True)
    console.print(f"Assumed: {'; '.join(report.assumptions) or 'nothing'}.")


def _strategies(report: SizeReport, console: Console) -> Iterator[Table]:
    """Strategies side by side as the width of the console allows, the others in further tables."""
    unbounded = console.options.update(width=1000)
    waiting = report.strategies
    while waiting:
        counts = range(len(waiting), 0, -1)
        tables = (_table(waiting[:count], with_fit=report.fit is not None) for count in counts)
        table = next(
            t for t in tables if len(t.columns) == 2 or console.measure(t, options=unbounded).maximum <= console.width
        )
        yield table
        waiting = waiting[len(table.columns) - 1 :]


def _table(strategies: Sequence[StrategyCost], *, with_fit: bool) -> Table:
    from rich.table import Table

    table = Table("bytes")
    for strategy in strategies:
        table.add_column(strategy.label, justify="right", overflow="fold")

    def row(label: str, cell: Callable[[StrategyCost], str]) -> None:
        table.add_row(label, *(cell(strategy) for strategy in strategies))

    row("HTP note's formula", lambda s: _or_dash(s.formula_bytes))
    row("allocated", lambda s: f"{s.held_bytes:,}")
    row("copied/token, filling", lambda s: f"{s.filling_bytes_per_token:,.0f}")
    row("copied/token, full", lambda s: f"{s.sliding_bytes_per_token:,.0f}")
    row("copied, worst step", lambda s: f"{s.worst_step_bytes:,}")
    table.add_section()
    row("tokens before a copy", lambda s: _or_dash(s.tokens_before_copy))
    row("rows per tensor", lambda s: f"{s.rows_per_tensor:,}")
    row("scratch rows", lambda s: f"{s.scratch_rows_per_tensor:,}")
    row("bindings per step", lambda s: f"{s.rebound_tensors_per_step:,}")
    row("addresses", lambda s: f"{s.registered_addresses:,}")
    if with_fit:
        table.add_section()
        row("fits", lambda s: "yes" if s.fits else "no")
        row("longest that fits", lambda s: _or_dash(s.largest_context))
    return table


def _graphs(report: SizeReport) -> Table:
    from rich.table import Table

    table = Table("graph", "inputs", "past rows", "outputs", "new rows")
    for column in table.columns[1:]:
        column.justify = "right"
    for graph in report.graphs:
        counts = (graph.inputs, graph.kv_inputs, graph.outputs, graph.kv_outputs)
        table.add_row(f"AR-{graph.ar} {graph.role}", *(f"{count:,}" for count in counts))
    return table


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
