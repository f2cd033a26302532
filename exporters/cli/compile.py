"""`edgekv compile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.htp_options import HtpOptions
from edgekv.option import Option, OptionGroup
from exporters.cli.common import DeviceOption, ForceOption, ready_to_run
from exporters.cli.next_step import next_line
from exporters.options import RunOptions
from exporters.progress import one_step, progress_bars

if TYPE_CHECKING:
    from edgekv.bundle import CompiledManifest

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
) -> None:
    """The binaries are stored in the bundle, one per part with the weights shared by all graphs. The target chip is
    read back from each binary.
    """
    import msgspec

    from edgekv.bundle import open_bundle
    from exporters.compile import compile_bundle  # slow to import, as are all in commands

    run = ready_to_run(run)
    with progress_bars(output.is_quiet) as progress:
        with one_step("verify bundle", progress):
            opened = open_bundle(bundle)
        peaks: dict[str, int] = {}
        compiled = compile_bundle(
            opened,
            device,
            run,
            per_graph_binaries=per_graph_binaries,
            force=force,
            progress=progress,
            watch=peaks.__setitem__,
            options=htp,
        )
    if output.as_json:
        print_json(msgspec.to_builtins(compiled) | {"peak_bytes": peaks})
        return
    show_compiled(bundle / "compiled" / compiled.soc, compiled, peaks)
    click.echo(next_line(bundle, opened.manifest, is_compiled=True))


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
