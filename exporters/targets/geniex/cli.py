"""`edgekv bundle geniex`."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.option import OptionGroup
from exporters.cli.common import ForceOption, OutputFolder
from exporters.progress import progress_bars
from exporters.targets.genie.options import GenieOptions


@command
def bundle_geniex(
    bundle: BundleArgument,
    target: OutputFolder,
    options: Annotated[GenieOptions, OptionGroup("Folder", only=("max_new_tokens", "bos", "check"))],
    output: Output,
    force: ForceOption = False,
) -> None:
    """Write the folder that Qualcomm's GenieX loads.

    The name of the folder is the model's. Its graphs run in Genie first, and it is read by the rules of GenieX's
    loader. The bundle must be exported with --sink none.
    """
    from edgekv.bundle import open_bundle
    from exporters.targets.geniex.write import write_geniex

    chosen = replace(options, per_graph_binaries=options.check)
    with progress_bars(output.is_quiet) as progress:
        written = write_geniex(open_bundle(bundle), target, chosen, force=force, progress=progress)
    if output.as_json:
        print_json(written)
        return
    read = written.read
    click.echo(f"{target}: {written.soc}, V{written.arch}, {written.compiler}, model_id {read.model_id}")
    contexts = ", ".join(map(str, read.contexts))
    click.echo(f"  {read.layers} layers, AR {read.decode} and {read.prefill}, contexts {contexts}")
    for name in read.binaries:
        click.echo(f"  {name}: {(target / name).stat().st_size / 1e6:.2f} MB")
    click.echo("  Genie chooses edgekv's tokens" if written.checked else "  not run in Genie")
    click.echo(f"next: geniex pull {quote(target.name)} --hub localfs --local-path {quote(str(target))}")
