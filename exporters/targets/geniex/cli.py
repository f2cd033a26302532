"""`edgekv bundle geniex`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from edgekv.cli.output import print_json

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)


def bundle_geniex(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder, exported with --sink none.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write; its name is the model's.")],
    max_new_tokens: Annotated[
        Optional[int], typer.Option(help="Longest answer, in tokens. Default: the context.")
    ] = None,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Put no BOS token in front of a query, if the chat template writes it.")
    ] = False,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="Do not run the same graphs in Genie on this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write the folder that Qualcomm's GenieX loads.

    Its graphs run in Genie first, and the folder is read by the rules of GenieX's loader.
    """
    from edgekv.bundle import open_bundle
    from exporters.progress import shown
    from exporters.targets.genie.plan import GenieOptions
    from exporters.targets.geniex.write import write_geniex

    options = GenieOptions(max_new_tokens=max_new_tokens, bos=not no_bos, each=not skip_check, check=not skip_check)
    with shown() as progress:
        written, loaded = write_geniex(open_bundle(bundle), output, options, force=force, progress=progress)
    if as_json:
        print_json(loaded)
        return
    typer.echo(f"{output}: {written.soc}, V{written.arch}, {written.compiler}, model_id {loaded.model_id}")
    contexts = ", ".join(map(str, loaded.contexts))
    typer.echo(f"  {loaded.layers} layers, AR {loaded.decode} and {loaded.prefill}, contexts {contexts}")
    for name in loaded.binaries:
        typer.echo(f"  {name}: {(output / name).stat().st_size / 1e6:.2f} MB")
    typer.echo("  Genie chooses edgekv's tokens" if written.checked else "  not run in Genie")
