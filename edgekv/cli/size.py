"""`edgekv size`: what a cache costs, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from devices import Device, UnknownDeviceError, find
from edgekv.cli.numbers import parse_numbers
from edgekv.errors import UsageError
from edgekv.plan.cache import Budget, Overrides, Report, StrategySize, find_subject, make_report, save_plot


def size(
    path: Annotated[
        Path | None, typer.Argument(help="A config.json, a folder that has one, or a bundle.", show_default=False)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers.", show_default=False)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads of a layer.", show_default=False)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of one head's row.", show_default=False)] = None,
    context: Annotated[int | None, typer.Option(help="Context length in tokens.", show_default=False)] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of a cache element: 8 or 16.", show_default=False)] = None,
    ar: Annotated[
        str | None, typer.Option(help="Tokens per inference of each graph.", show_default="1,32, or a bundle's own")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Say whether it fits this device and what to choose for it; part number or name.", show_default=False
        ),
    ] = None,
    budget_gb: Annotated[
        float | None,
        typer.Option(help="Memory for weights and cache, in 10^9 bytes.", show_default="one HTP context's"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw memory against copied bytes into this .png, .svg or .pdf.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a cache costs with each update strategy, which one to choose, and what fits.

    For each: bytes held, bytes copied per token and in the worst step, tensors to bind anew per step, addresses to
    register once.
    """
    steps = None if ar is None else parse_numbers("--ar", ar)
    overrides = Overrides(layers, kv_heads, head_dim, context, kv_bits, steps)
    target = None if device is None else _device(device)
    budget = None if budget_gb is None else Budget.of_option(budget_gb)
    report = make_report(find_subject(path, overrides), device=target, budget=budget)
    if plot is not None:
        save_plot(report, plot)
    if as_json:
        typer.echo(msgspec.json.encode(report))
    else:
        _show(report)


def _device(name: str) -> Device:
    try:
        return find(name)
    except UnknownDeviceError as error:
        near = f"Did you mean {' or '.join(error.near)}?" if error.near else "Use one of these."
        wanted = f"one of {', '.join(error.expected)}, or a name that one is sold under"
        raise UsageError("--device", got=repr(name), expected=wanted, fix=near) from None


def _show(report: Report) -> None:
    console = Console(markup=False, highlight=False)
    if report.verdict is not None:
        console.print(report.verdict.text, end="\n\n")
    g = report.geometry
    console.print(
        f"{g.layers} layers x 2 x {g.kv_heads} kv heads = {g.tensors:,} tensors of {g.head_dim} columns, "
        f"context {g.context:,}, {g.kv_bits} bits ({g.kv_dtype}), from {report.source}"
    )
    for table in _strategies(report, console):
        console.print(table)
    console.print(f"Choose {report.recommendation.reason}", soft_wrap=True)
    console.print(_graphs(report))
    console.print(f"Assumed: {'; '.join(report.assumptions) or 'nothing'}.")


def _strategies(report: Report, console: Console) -> Iterator[Table]:
    """As many side by side as the console is wide, the others below."""
    unbounded = console.options.update(width=1000)
    waiting = report.strategies
    while waiting:
        counts = range(len(waiting), 0, -1)
        tables = (_table(waiting[:count], with_verdict=report.verdict is not None) for count in counts)
        table = next(
            t for t in tables if len(t.columns) == 2 or console.measure(t, options=unbounded).maximum <= console.width
        )
        yield table
        waiting = waiting[len(table.columns) - 1 :]


def _table(strategies: Sequence[StrategySize], *, with_verdict: bool) -> Table:
    table = Table("bytes")
    for each in strategies:
        table.add_column(each.label, justify="right", overflow="fold")

    def row(label: str, cell: Callable[[StrategySize], str]) -> None:
        table.add_row(label, *(cell(each) for each in strategies))

    row("HTP note's formula", lambda s: _or_dash(s.formula_bytes))
    row("really held", lambda s: f"{s.held_bytes:,}")
    row("copy/token, filling", lambda s: f"{s.filling_bytes_per_token:,.0f}")
    row("copy/token, sliding", lambda s: f"{s.sliding_bytes_per_token:,.0f}")
    row("copy, worst step", lambda s: f"{s.worst_step_bytes:,}")
    table.add_section()
    row("tokens before a copy", lambda s: _or_dash(s.tokens_before_copy))
    row("rows per tensor", lambda s: f"{s.rows_per_tensor:,}")
    row("scratch rows", lambda s: f"{s.scratch_rows_per_tensor:,}")
    row("bound anew per step", lambda s: f"{s.rebound_tensors_per_step:,}")
    row("addresses in all", lambda s: f"{s.registered_addresses:,}")
    if with_verdict:
        table.add_section()
        row("fits", lambda s: "yes" if s.fits else "no")
        row("largest that fits", lambda s: _or_dash(s.largest_context))
    return table


def _graphs(report: Report) -> Table:
    table = Table("graph", *("inputs", "of them past", "outputs", "of them new rows"))
    for column in table.columns[1:]:
        column.justify = "right"
    for each in report.graphs:
        counts = (each.inputs, each.kv_inputs, each.outputs, each.kv_outputs)
        table.add_row(f"AR-{each.ar} {each.role}", *(f"{count:,}" for count in counts))
    return table


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
