"""`edgekv bundle genie` and `edgekv genie run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from devices import find
from edgekv.cli.output import print_json
from edgekv.errors import UsageError

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

genie = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run what `edgekv bundle genie` wrote in Genie.")


@genie.callback()
def _genie() -> None:
    pass


def bundle_genie(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    device: Annotated[
        Optional[str], typer.Option("--device", help="Target chip; must be the one that the bundle was exported for.")
    ] = None,
    context: Annotated[
        Optional[int], typer.Option(help="Longest context to use, in tokens. Default: the longest of the graphs.")
    ] = None,
    max_new_tokens: Annotated[
        Optional[int], typer.Option(help="Longest answer, in tokens. Default: the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[Optional[int], typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        Optional[float], typer.Option(help="Sample from the most likely tokens whose probabilities add up to p.")
    ] = None,
    seed: Annotated[Optional[int], typer.Option(help="Random seed. Default: 0.")] = None,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Put no BOS token in front of a query, if the chat template writes it.")
    ] = False,
    embedding_table: Annotated[
        bool, typer.Option("--embedding-table", help="Let Genie look up embeddings in a file instead of the graphs.")
    ] = False,
    each: Annotated[
        bool,
        typer.Option(
            "--each/--no-each",
            help="Also write one binary per graph. Genie on x86 loads no others; a phone does not need them.",
        ),
    ] = True,
    skip_check: Annotated[
        bool,
        typer.Option("--skip-check", help="Do not run the result in Genie; the folder records that it is unchecked."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write the folder that Qualcomm's Genie loads.

    It has context binaries of single graphs and one that shares the weights, a configuration for each, and the
    tokenizer. Genie itself loads the single graphs and must choose the same tokens as edgekv.
    """
    from edgekv.bundle import open_bundle
    from edgekv.text import SamplingParams
    from exporters.progress import shown
    from exporters.targets.genie.plan import GenieOptions
    from exporters.targets.genie.write import write_genie

    options = GenieOptions(
        device=None if device is None else find(device),
        context=context,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature, top_k, top_p, seed),
        bos=not no_bos,
        embedding_table=embedding_table,
        each=each,
        check=not skip_check,
    )
    opened = open_bundle(bundle)
    with shown() as progress:
        written = write_genie(opened, output, options, force=force, progress=progress)
    if as_json:
        print_json(written)
        return
    typer.echo(f"{output}: {written.soc}, V{written.arch}, context {written.context}, {written.compiler}")
    for file in dict.fromkeys(graph.file for graph in written.graphs):
        held = [f"AR-{graph.ar} in {graph.context}" for graph in written.graphs if graph.file == file]
        typer.echo(f"  {file}: {written.files[file].bytes / 1e6:.2f} MB, {', '.join(held)}")
    for shared in written.shared:
        typer.echo(f"  {shared}: {written.files[shared].bytes / 1e6:.2f} MB, all of them, weights shared")
    if (sink := written.sink) is not None:
        typer.echo(f"  restore {sink.state} before the first query; it holds {sink.text!r}, which prompts leave out")
    if adapters := written.adapters or ():
        typer.echo(f"  adapters: {', '.join(each.name for each in adapters)}")
    typer.echo("  Genie chooses edgekv's tokens" if written.checked else "  not run in Genie")


def check_new_tokens(count: int | None) -> None:
    """Refuse an answer without tokens.

    Raises:
        UsageError: the number is below 1.
    """
    if count is not None and count < 1:
        raise UsageError("--max-new-tokens", got=count, expected="at least 1", fix="Ask for one or more.")


@genie.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="A folder that `edgekv bundle genie` wrote.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[
        Optional[int], typer.Option(help="Maximum number of new tokens. Default: the configuration's.")
    ] = None,
    lora: Annotated[Optional[str], typer.Option(help="An adapter of the folder.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Continue a prompt in Genie on this machine.

    On x86, Genie runs on Qualcomm's emulator, which loads only the binaries of single graphs.
    """
    from exporters.targets.genie.dialog import GenieDialog
    from exporters.targets.genie.folder import open_genie_folder

    check_new_tokens(max_new_tokens)
    opened = open_genie_folder(folder)
    text = opened.query(prompt)
    adapter = None if lora is None else opened.adapter(lora)
    pieces = []
    with GenieDialog(opened.path, opened.config(), opened.state, arch=opened.manifest.arch) as dialog:
        if adapter is not None:
            dialog.apply_lora(adapter.name, opened.adapter_state(adapter))
        for piece in dialog.query(text, max_new_tokens):
            pieces.append(piece)
            if not as_json:
                typer.echo(piece, nl=False)
    if as_json:
        print_json({"text": "".join(pieces)})
    else:
        typer.echo()
