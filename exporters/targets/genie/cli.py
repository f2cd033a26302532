"""`edgekv bundle genie` and `edgekv genie run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from edgekv.cli.command import Group, command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.cli.pictures import ImageOption
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup
from exporters.cli.common import ForceOption, OutputFolder
from exporters.cli.next_step import next_command
from exporters.progress import progress_bars
from exporters.targets.genie.options import GenieOptions

if TYPE_CHECKING:
    from exporters.targets.genie.folder import GenieFolder

genie = Group()


@command
def bundle_genie(
    bundle: BundleArgument,
    target: OutputFolder,
    options: Annotated[GenieOptions, OptionGroup("Folder")],
    output: Output,
    force: ForceOption = False,
) -> None:
    """Write the folder that Qualcomm's Genie loads.

    It has context binaries of single graphs and one that shares the weights, a configuration for each, and the
    tokenizer. Genie itself loads the single graphs and must choose the same tokens as edgekv.
    """
    from edgekv.bundle import open_bundle
    from exporters.targets.genie.config import ENCODER_BINARY
    from exporters.targets.genie.write import write_genie

    opened = open_bundle(bundle)
    with progress_bars(output.is_quiet) as progress:
        written = write_genie(opened, target, options, force=force, progress=progress)
    if output.as_json:
        print_json(written)
        return
    click.echo(f"{target}: {written.soc}, V{written.arch}, context {written.context}, {written.compiler}")
    for file in dict.fromkeys(graph.file for graph in written.graphs):
        held = [f"AR-{graph.ar} in {graph.context}" for graph in written.graphs if graph.file == file]
        click.echo(f"  {file}: {written.files[file].bytes / 1e6:.2f} MB, {', '.join(held)}")
    for shared in written.shared:
        click.echo(f"  {shared}: {written.files[shared].bytes / 1e6:.2f} MB, all of them, weights shared")
    if (sink := written.sink) is not None:
        click.echo(f"  restore {sink.state} before the first query; it holds {sink.text!r}, which prompts leave out")
    if written.vision:
        click.echo(f"  {ENCODER_BINARY}: {written.files[ENCODER_BINARY].bytes / 1e6:.2f} MB, the vision encoder")
    if adapters := written.adapters or ():
        click.echo(f"  adapters: {', '.join(adapter.name for adapter in adapters)}")
    click.echo("  Genie chooses edgekv's tokens" if written.checked else "  not run in Genie")
    click.echo(next_command("genie run", target))


def check_new_tokens(count: int | None) -> None:
    """Refuse an answer without tokens.

    Raises:
        UsageError: the number is below 1.
    """
    if count is not None and count < 1:
        raise UsageError("max_new_tokens", got=count, expected="at least 1", fix="Ask for one or more.")


@genie.command("run")
def run(
    folder: Annotated[Path, Argument("A folder that `edgekv bundle genie` wrote.")],
    prompt: Annotated[str, Option("The text to continue.")],
    output: Output,
    max_new_tokens: Annotated[int | None, Option("Maximum number of new tokens.", shown="the configuration's")] = None,
    lora: Annotated[str | None, Option("An adapter of the folder.", metavar="NAME")] = None,
    image: ImageOption = (),
) -> None:
    """Continue a prompt in Genie on this machine.

    On x86, Genie runs on Qualcomm's emulator, which loads only the binaries of single graphs.
    """
    from exporters.targets.genie.dialog import GenieDialog
    from exporters.targets.genie.folder import open_genie_folder

    check_new_tokens(max_new_tokens)
    opened = open_genie_folder(folder)
    if image:
        if lora is not None:
            raise UsageError("--lora", got="it with --image", expected="one of them", fix="Leave one out.")
        _print_pieces(_with_pictures(opened, prompt, image, max_new_tokens), output)
        return
    text = opened.query(prompt)
    adapter = None if lora is None else opened.adapter(lora)
    with GenieDialog(opened.path, opened.config(), opened.state, arch=opened.manifest.arch) as dialog:
        if adapter is not None:
            dialog.apply_lora(adapter.name, opened.adapter_state(adapter))
        _print_pieces(dialog.query(text, max_new_tokens), output)


def _with_pictures(
    folder: GenieFolder, prompt: str, files: Sequence[Path], max_new_tokens: int | None
) -> Iterator[str]:
    from exporters.targets.genie.pictures import GeniePipeline, prompt_of

    pieces, nodes = prompt_of(folder, prompt, files), folder.nodes()
    if max_new_tokens is not None:
        generator = msgspec.structs.replace(nodes.text_generator, max_num_tokens=max_new_tokens)
        nodes = msgspec.structs.replace(nodes, text_generator=generator)
    with GeniePipeline(folder.path, nodes, arch=folder.manifest.arch) as genie:
        yield from map(str, genie.query(pieces))


def _print_pieces(answer: Iterator[str], output: Output) -> None:
    pieces = []
    for piece in answer:
        pieces.append(piece)
        if not output.as_json:
            click.echo(piece, nl=False)
    if output.as_json:
        print_json({"text": "".join(pieces)})
    else:
        click.echo()
