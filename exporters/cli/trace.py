"""The commands `edgekv trace` and `edgekv diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.cli.summary import engine_and_mode
from edgekv.errors import UsageError
from edgekv.machine.text_file import read_text_file
from edgekv.option import Argument, Option
from edgekv.runtime.load_options import EngineOptions
from exporters.cli.common import CheckpointOption, MovedAdapters, TextOption


@command
def trace(
    bundle: BundleArgument,
    file: Annotated[Path, Option("The .npz file to write.", "-o --output")],
    text: TextOption,
    output: Output,
    engine: Annotated[
        str, Option("reference (the float32 checkpoint), or the bundle's graph on cpu (which emulates the HTP) or htp.")
    ] = "cpu",
    tokens: Annotated[int, Option("Number of tokens, from the start of the text.", minimum=2)] = 64,
    checkpoint: CheckpointOption = None,
    lora: MovedAdapters = (),
) -> None:
    """Compare two traces of the same model and text with `edgekv diff`."""
    from edgekv.bundle import open_bundle
    from edgekv.runtime import make_engine
    from exporters.checkpoint.folded import transformed_as
    from exporters.inspect.evaluate import open_source
    from exporters.inspect.probe import Probe
    from exporters.inspect.trace import trace_reference, write_trace
    from exporters.quantize.calibrate import token_windows

    content = read_text_file(text, "--text")
    opened = open_bundle(bundle)
    if tokens > opened.manifest.context:
        raise UsageError(
            "--tokens",
            got=tokens,
            expected=f"at most {opened.manifest.context}, the context of the bundle",
            fix="Trace fewer tokens.",
        )
    source = open_source(opened.manifest, checkpoint, lora)
    sink = [] if opened.manifest.sink is None else opened.manifest.sink.tokens
    window = token_windows(source, content, tokens, 1, first=sink or None, field="--tokens")[0].tolist()
    if engine == "reference":
        tensors = transformed_as(opened, source)
        results = trace_reference(tensors, window, opened.manifest.context, first=len(sink))
    else:
        results = Probe(opened, make_engine(opened, EngineOptions(engine))).run(window)
    write_trace(results, file)
    if output.as_json:
        print_json({"file": str(file), "results": len(results), "tokens": len(window)})
    else:
        click.echo(f"{file}: {len(results)} results of {len(window)} tokens on {engine_and_mode(engine)}")


@command
def diff(
    a: Annotated[Path, Argument("The trace to compare with, e.g. of the reference.", metavar="A.npz")],
    b: Annotated[Path, Argument("The trace to check.", metavar="B.npz")],
    output: Output,
    limit_db: Annotated[float, Option("Results differ if their SQNR is below this limit, in dB.")] = 20.0,
) -> None:
    """Traces of the engine cpu are those of its mode emulate. The exit code is 0 in both cases."""
    from exporters.inspect.divergence import find_divergence
    from exporters.inspect.trace import read_trace

    divergence = find_divergence(read_trace(a), read_trace(b), limit_db=limit_db)
    if output.as_json:
        print_json(divergence)
        return
    if divergence.first is None:
        click.echo(f"no difference: all {divergence.results} results agree to {limit_db:g} dB or better")
    else:
        place = "" if divergence.layer is None else f", layer {divergence.layer}"
        click.echo(
            f"first difference: {divergence.first}{place}, {divergence.sqnr_db:.1f} dB from token {divergence.token} on"
        )
        click.echo(
            f"  before it: {divergence.before}, {divergence.before_db:.1f} dB"
            if divergence.before
            else "  nothing before it"
        )
        click.echo(f"  probable cause: {divergence.cause}")
    click.echo("results that agree least:")
    for name, level in divergence.worst:
        click.echo(f"  {level:6.1f} dB  {name}")
