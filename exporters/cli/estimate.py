"""`edgekv estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.htp_options import HtpOptions
from edgekv.option import Option, OptionGroup
from exporters.cli.common import DeviceOption
from exporters.options import RunOptions
from exporters.progress import one_step, progress_bars

if TYPE_CHECKING:
    from exporters.estimate import Estimate, GraphEstimate

_HTP_DEFAULTS = HtpOptions()
_RUN = ("cache_dir",)


@command
def estimate(
    bundle: BundleArgument,
    device: DeviceOption,
    run: Annotated[RunOptions, OptionGroup("Run", only=_RUN)],
    output: Output,
    slices: Annotated[
        bool | None,
        Option(
            "Compile slices of two layers and the head, and add their times.",
            "--slices/--no-slices",
            shown="slices from 300 M parameters on",
        ),
    ] = None,
    htp: Annotated[
        HtpOptions,
        Option(
            "Options of the compiler: vtcm=MIB,optimization=1 to 3.",
            metavar="OPTIONS",
            parse=lambda _, text: HtpOptions.parse(text),
            shown="the chip's, 2",
        ),
    ] = _HTP_DEFAULTS,
) -> None:
    """Nothing is measured: the compiler knows the cost of each operation on two chips, which stand for others of their
    HTP version.
    """
    from edgekv.bundle import open_bundle
    from exporters.estimate import estimate_bundle  # slow to import, as are all in commands

    with progress_bars(output.is_quiet) as progress:
        with one_step("verify bundle", progress):
            opened = open_bundle(bundle)
        found = estimate_bundle(opened, device, run, in_slices=slices, progress=progress, options=htp)
    if output.as_json:
        print_json(found)
    else:
        show_estimate(found)


def show_estimate(estimate: Estimate) -> None:
    """Print the figures of each graph, and how far to trust them."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    level = "" if estimate.optimization is None else f", optimization level {estimate.optimization}"
    console.print(f"{estimate.source}: simulated for {estimate.device}, {estimate.compiler}{level}", soft_wrap=True)
    for proxy in estimate.proxies:
        table = Table(title=f"on {proxy}", title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("graph", no_wrap=True)
        for heading in ("us", "between", "tokens/s", "moved", "GB/s", "bound by", "spilled"):
            table.add_column(heading, justify="left" if heading == "bound by" else "right", no_wrap=True)
        for graph in (each for each in estimate.graphs if each.proxy == proxy):
            table.add_row(graph.graph, *_cells(graph))
        console.print(table)
    for note in estimate.notes:
        console.print(f"{note}.", soft_wrap=True)


def _cells(graph: GraphEstimate) -> list[str]:
    from edgekv.system import format_bytes

    if graph.tokens_per_s is None:
        return ["void"]
    speed = graph.tokens_per_s
    return [
        f"{graph.us:,.0f}",
        f"{graph.low_us:,.0f}-{graph.high_us:,.0f}",
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
        format_bytes(graph.moved_bytes),
        f"{graph.gb_per_s:.1f}",
        f"{graph.bound} {max(graph.busy.values()):.0%}",
        format_bytes(graph.spilled_bytes) if graph.spilled_bytes else "none",
    ]
