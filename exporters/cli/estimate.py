"""`edgekv estimate`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.option import Option, OptionGroup
from edgekv.qnn.options import HtpOptions
from exporters.cli.common import DeviceOption
from exporters.options import RunOptions
from exporters.progress import one_step, progress_bars

if TYPE_CHECKING:
    from rich.table import Table

    from edgekv.plan.estimate import Estimate, GraphEstimate

_HTP_DEFAULTS = HtpOptions()
_RUN = ("cache_dir",)
_SHOWN = 16


@command
def estimate(
    bundle: BundleArgument,
    device: DeviceOption,
    run: Annotated[RunOptions, OptionGroup("Run", only=_RUN)],
    output: Output,
    slices: Annotated[
        bool | None,
        Option(
            "Compile slices of layers and the head, and add their times.",
            "--slices/--no-slices",
            shown="slices for more than 8 layers",
        ),
    ] = None,
    htp: Annotated[
        HtpOptions,
        Option(
            "Options of the compiler: vtcm=MIB,optimization=1 to 3.",
            metavar="OPTIONS",
            parse=lambda _, text: HtpOptions.parse(text),
            shown="the chip's, 3",
        ),
    ] = _HTP_DEFAULTS,
    ops: Annotated[
        bool, Option("Print where the time goes, by part of the model and by kind of operation.", group="Reports")
    ] = False,
    html: Annotated[
        Path | None,
        Option("Write a page (.html): the schedule of a layer by unit, and where the time goes.", group="Reports"),
    ] = None,
    against: Annotated[
        Path | None, Option("A second bundle, to put beside it.", metavar="BUNDLE", group="Reports")
    ] = None,
) -> None:
    """Nothing is measured: the compiler knows the cost of each operation on two chips, which stand for others of their
    HTP version.
    """
    import msgspec

    from edgekv.bundle import open_bundle
    from exporters.estimate import GENERATOR, estimate_bundle, simulate_bundle, write_page
    from exporters.inspect.page import check_page_path

    if html is not None:
        check_page_path(html, GENERATOR)
    other = None
    with progress_bars(output.is_quiet) as progress:
        with one_step("verify bundle", progress):
            opened = open_bundle(bundle)
        simulated = simulate_bundle(opened, device, run, in_slices=slices, progress=progress, options=htp)
        if against is not None:
            second = open_bundle(against)
            other = estimate_bundle(second, device, run, in_slices=slices, progress=progress, options=htp)
    if html is not None:
        write_page(html, simulated, other)
    if output.as_json:
        print_json({**msgspec.to_builtins(simulated.estimate), "against": other})
        return
    show_estimate(simulated.estimate, other, with_ops=ops)
    if html is not None:
        click.echo(html)


def show_estimate(estimate: Estimate, other: Estimate | None = None, *, with_ops: bool = False) -> None:
    """Print the figures of each graph, and how far to trust them."""
    from rich.console import Console

    from edgekv.plan.estimate import compared

    console = Console(markup=False, highlight=False)
    level = f", optimization level {estimate.optimization}"
    beside = "" if other is None else f"; beside {other.source}"
    console.print(
        f"{estimate.source}: simulated for {estimate.device}, {estimate.compiler}{level}{beside}", soft_wrap=True
    )
    rows = [*compared(estimate, other)]
    for proxy in estimate.proxies:
        table = _table("", "us", "lower", "upper", "tokens/s", "moved", "GB/s", "bound by", "spills")
        for graph, other_graph, verdict in rows:
            if graph.proxy == proxy:
                table.add_row(graph.graph, *_cells(graph))
            if graph.proxy == proxy and other_graph is not None:
                table.add_row("  the other", *_cells(other_graph))
                table.add_row(f"  this one: {verdict}")
        console.print(f"\non {proxy}:")
        console.print(table)
    for graph, _, _ in rows if with_ops else ():
        console.print(f"\n{graph.graph} on {graph.proxy}, shares of time:")
        console.print(", ".join(f"{part} {share:.0%}" for part, share in graph.parts.items()), soft_wrap=True)
        table = _table("share", "operation")
        for operation, share in islice(graph.operations.items(), _SHOWN):
            table.add_row(f"{share:.1%}", operation)
        console.print(table)
    console.print()
    for note in estimate.notes:
        console.print(f"{note}.", soft_wrap=True)


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in headings:
        is_text = heading in ("", "bound by", "operation")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    return table


def _cells(graph: GraphEstimate) -> list[str]:
    from edgekv.machine.system import format_bytes

    if graph.tokens_per_s is None:
        return ["void"]
    speed = graph.tokens_per_s
    return [
        *(f"{us:,.0f}" for us in (graph.us, graph.low_us, graph.high_us)),
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
        format_bytes(graph.moved_bytes),
        f"{graph.gb_per_s:.1f}",
        f"{graph.bound} {max(graph.busy.values()):.0%}",
        format_bytes(graph.spilled_bytes) if graph.spilled_bytes else "none",
    ]
