"""`edgekv compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.machine.system import format_bytes
from edgekv.option import Option, OptionGroup
from edgekv.qnn.options import HtpOptions
from exporters.cli.common import DeviceOption, EstimateOption, ForceOption, ready_to_run
from exporters.cli.estimate import show_estimate
from exporters.cli.next_step import next_line
from exporters.cli.pieces import resumable
from exporters.options import RunOptions
from exporters.progress import Progress, one_step, progress_bars

if TYPE_CHECKING:
    from devices import Device
    from edgekv.bundle import Bundle, CompiledManifest
    from edgekv.plan.estimate import Estimate

_HTP_DEFAULTS = HtpOptions()
_RUN = ("cache_dir", "store", "resume", "cluster.scheduler")


@command
def compile_(
    bundle: BundleArgument,
    device: DeviceOption,
    run: Annotated[RunOptions, OptionGroup("Run", only=_RUN)],
    output: Output,
    per_graph_binaries: Annotated[
        bool | None,
        Option(
            "Also write one binary per graph; the x86 emulator can load only these.",
            "--per-graph-binaries/--no-per-graph-binaries",
            shown="yes, unless the graphs are split into parts",
        ),
    ] = None,
    experts: Annotated[
        Literal["all", "operands"],
        Option(
            "How decode graphs of a mixture compute experts: all of them, or divided at the routers, with the integers "
            "of chosen experts as inputs of one graph.",
            metavar="all|operands",
        ),
    ] = "all",
    htp: Annotated[
        HtpOptions,
        Option(
            "Options of the compiler: vtcm=MIB,optimization=1 to 3, or fastest, by simulation.",
            metavar="OPTIONS",
            parse=lambda _, text: HtpOptions.parse(text),
            shown="the chip's, 3",
        ),
    ] = _HTP_DEFAULTS,
    force: ForceOption = False,
    estimate: EstimateOption = False,
) -> None:
    """The binaries are stored in the bundle, one per part with the weights shared by all graphs. The target chip is
    read back from each binary.
    """
    import msgspec

    from edgekv.bundle import open_bundle
    from edgekv.runtime.expert_operands import ExpertOperands
    from exporters.compile import BinaryChoice, compile_bundle  # slow to import, as are all in commands

    if estimate and experts == "operands":
        fix = "Leave one of them out."
        raise UsageError("--estimate", got="it with --experts operands", expected="graphs of the export", fix=fix)
    run = ready_to_run(run)
    with progress_bars(output.is_quiet) as bars, resumable(bars) as progress:
        with one_step("verify bundle", progress):
            opened = open_bundle(bundle)
        peaks: dict[str, int] = {}
        compiled = compile_bundle(
            opened,
            device,
            run,
            choice=BinaryChoice(per_graph_binaries, divides_experts=experts == "operands"),
            force=force,
            progress=progress,
            watch=peaks.__setitem__,
            options=htp,
        )
        estimated = estimate_shipped(opened, device, compiled, run, progress, htp) if estimate else None
    if output.as_json:
        print_json(msgspec.to_builtins(compiled) | {"peak_bytes": peaks, "estimate": estimated})
        return
    show_compiled(bundle / "compiled" / compiled.soc, compiled, peaks)
    if compiled.expert_steps is not None:
        held = format_bytes(ExpertOperands(opened, compiled.expert_steps).held_bytes)
        click.echo(f"  experts are inputs of decode graphs: {held} in memory, beside the binaries")
    if estimated is not None:
        show_estimate(estimated)
    click.echo(next_line(bundle, opened.manifest, is_compiled=True))


def estimate_shipped(
    bundle: Bundle, device: Device, compiled: CompiledManifest, run: RunOptions, progress: Progress, htp: HtpOptions
) -> Estimate:
    """The speed of binaries that were written just now: at the level of those that share their weights."""
    from exporters.estimate import estimate_bundle

    level = max(compiled.binaries, key=lambda binary: binary.graphs).optimization
    return estimate_bundle(bundle, device, run, progress=progress, options=replace(htp, optimization=level))


def show_compiled(folder: Path, compiled: CompiledManifest, peaks: Mapping[str, int]) -> None:
    """Print the binaries that were written, their size, and the peak RAM of the compiler for each."""
    vtcm = compiled.vtcm_bytes >> 20
    click.echo(f"{folder}: {compiled.soc}, V{compiled.arch}, {vtcm} MiB VTCM")
    for binary in compiled.binaries:
        size = compiled.files[binary.file].bytes / 1e6
        held = "weights shared by " if binary.graphs > 1 else ""
        level = "" if binary.optimization is None else f", optimization level {binary.optimization}"
        peak = f"; compiled in {peaks[binary.file] / 1e9:.2f} GB of RAM" if binary.file in peaks else ""
        click.echo(f"  {binary.file}: {size:.2f} MB, {held}{', '.join(binary.wrappers)}{level}{peak}")
    if compiled.floating_nodes:
        click.echo(f"  {len(compiled.floating_nodes)} nodes compute in float")
