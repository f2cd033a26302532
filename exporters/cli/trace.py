"""The commands `edgekv trace` and `edgekv diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgekv.bundle import open_bundle
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.load_options import EngineOptions
from edgekv.runtime import make_engine
from edgekv.text_file import read_text_file
from exporters.checkpoint.folded import transformed_as
from exporters.cli.options import JsonOption, MovedAdapters
from exporters.inspect.divergence import find_divergence
from exporters.inspect.evaluate import open_source
from exporters.inspect.probe import Probe
from exporters.inspect.trace import read_trace, trace_reference, write_trace
from exporters.quantize.calibrate import token_windows


def trace(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file; its first tokens are traced.")],
    engine: Annotated[
        str, typer.Option(help="reference (the float32 checkpoint), cpu or htp (the bundle's graph).")
    ] = "cpu",
    tokens: Annotated[int, typer.Option(min=2, help="Number of tokens.")] = 64,
    checkpoint: Annotated[str | None, typer.Option(help="The checkpoint, if it has moved since the export.")] = None,
    lora: MovedAdapters = None,
    as_json: JsonOption = False,
) -> None:
    """Write every intermediate result of the decoder for the first tokens of a text.

    Compare two traces of the same model and text with `edgekv diff`.
    """
    content = read_text_file(text, "--text")
    opened = open_bundle(bundle)
    if tokens > opened.manifest.context:
        raise UsageError(
            "--tokens",
            got=tokens,
            expected=f"at most {opened.manifest.context}, the context of the bundle",
            fix="Trace fewer tokens.",
        )
    source = open_source(opened.manifest, checkpoint, lora or ())
    sink = [] if opened.manifest.sink is None else opened.manifest.sink.tokens
    window = token_windows(source, content, tokens, 1, first=sink or None, field="--tokens")[0].tolist()
    if engine == "reference":
        tensors = transformed_as(opened, source)
        found = trace_reference(tensors, window, opened.manifest.context, first=len(sink))
    else:
        found = Probe(opened, make_engine(opened, EngineOptions(engine))).run(window)
    write_trace(found, output)
    if as_json:
        print_json({"file": str(output), "results": len(found), "tokens": len(window)})
    else:
        typer.echo(f"{output}: {len(found)} results of {len(window)} tokens on {engine}")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A.npz", help="The trace to compare with, e.g. of the reference.")],
    b: Annotated[Path, typer.Argument(metavar="B.npz", help="The trace to check.")],
    limit_db: Annotated[float, typer.Option(help="Results differ if their SQNR is below this limit, in dB.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Find the first result in which two traces differ, and its probable cause.

    The exit code is 0 in both cases.
    """
    found = find_divergence(read_trace(a), read_trace(b), limit_db=limit_db)
    if as_json:
        print_json(found)
        return
    if found.first is None:
        typer.echo(f"no difference: all {found.results} results agree to {limit_db:g} dB or better")
    else:
        place = "" if found.layer is None else f", layer {found.layer}"
        typer.echo(f"first difference: {found.first}{place}, {found.sqnr_db:.1f} dB from token {found.token} on")
        typer.echo(f"  before it: {found.before}, {found.before_db:.1f} dB" if found.before else "  nothing before it")
        typer.echo(f"  probable cause: {found.cause}")
    typer.echo("results that agree least:")
    for name, level in found.worst:
        typer.echo(f"  {level:6.1f} dB  {name}")
