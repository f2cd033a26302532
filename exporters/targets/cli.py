"""`edgekv bundle genie`, `geniex` and `genai`: a bundle as the files that another runtime loads; `edgekv genie run` and
`edgekv genai run`: a prompt in such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import click
import msgspec

from devices import find
from edgekv.cli.command import NOTHING, Group, OptionValues
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.cli.pictures import ImageOption
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup
from edgekv.text.params import DEFAULT_MAX_NEW_TOKENS
from exporters.cli.common import ForceOption, OutputFolder
from exporters.cli.next_step import next_command
from exporters.progress import progress_bars
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genie.options import GenieOptions

if TYPE_CHECKING:
    from exporters.targets.genie.folder import GenieFolder

bundle, genie, genai = Group(), Group(), Group()


class Continuation(msgspec.Struct, frozen=True):
    """What `edgekv genai run --json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str


@bundle.command("genie")
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


@bundle.command("geniex")
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
    from exporters.targets.geniex import write_geniex

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


@bundle.command("genai")
def bundle_genai(
    bundle: BundleArgument,
    target: OutputFolder,
    output: Output,
    choices: Annotated[OptionValues[GenaiOptions], OptionGroup("Folder")] = NOTHING,
    engine: Annotated[Literal["htp", "cpu"], Option("Engine that runs the graphs.", group="Folder")] = "htp",
    force: ForceOption = False,
) -> None:
    """Write the folder that onnxruntime-genai loads.

    Its graphs keep the heads of a layer in one tensor and must compute the same integers as the bundle's graphs.
    The cache must be u8.
    """
    from edgekv.bundle import open_bundle
    from exporters.targets.genai.write import write_genai

    opened = open_bundle(bundle)
    if engine == "cpu" and (device := choices.get("device")) is not None:
        got = f"{device.soc} with the engine cpu"
        raise UsageError("--device", got=got, expected="none", fix="Leave it out.")
    chip = None if engine == "cpu" else find(opened.manifest.device)
    options = GenaiOptions(**{"device": chip, **choices})
    with progress_bars(output.is_quiet) as progress:
        written = write_genai(opened, target, options, force=force, progress=progress)
    if output.as_json:
        print_json(written)
        return
    held = sum(record.bytes for record in written.files.values())
    where = "the CPU" if written.soc is None else written.soc
    click.echo(f"{target}: for {where}, context {written.context}, {held / 1e6:.1f} MB")
    click.echo(f"  prompts run in windows of {written.window} tokens, padded with token {written.pad_token}")
    if written.sink:
        text = opened.tokenizer().decode(written.sink, skip_special_tokens=False)
        click.echo(f"  the graphs begin every text with {text!r}, which prompts leave out")
    if written.left_out:
        click.echo(f"  left out: {', '.join(written.left_out)}, since onnxruntime-genai decodes one token a step")
    click.echo(
        "  the graphs return the same integers as the bundle's" if written.checked else "  not compared with the bundle"
    )
    click.echo(next_command("genai run", target))


@genie.command("run")
def run_genie(
    folder: Annotated[Path, Argument("A folder that `edgekv bundle genie` wrote.")],
    prompt: Annotated[str, Option("The text to continue.")],
    output: Output,
    max_new_tokens: Annotated[
        int | None, Option("Maximum number of new tokens.", shown="the configuration's", minimum=1)
    ] = None,
    lora: Annotated[str | None, Option("An adapter of the folder.", metavar="NAME")] = None,
    image: ImageOption = (),
) -> None:
    """Continue a prompt in Genie on this machine.

    On x86, Genie runs on Qualcomm's emulator, which loads only the binaries of single graphs.
    """
    from exporters.targets.genie.dialog import GenieDialog
    from exporters.targets.genie.folder import open_genie_folder

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
    from exporters.targets.genie.dialog import GeniePipeline

    pieces, nodes = folder.vision().prompt_of(prompt, files), folder.nodes()
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


@genai.command("run")
def run_genai(
    folder: Annotated[Path, Argument("A folder that `edgekv bundle genai` wrote.")],
    prompt: Annotated[str, Option("The text to continue.")],
    output: Output,
    max_new_tokens: Annotated[int, Option("Maximum number of new tokens.", minimum=1)] = DEFAULT_MAX_NEW_TOKENS,
) -> None:
    """Continue a prompt in onnxruntime-genai on this machine, greedily."""
    from exporters.targets.genai.folder import open_genai_folder, run_folder

    opened = open_genai_folder(folder)
    tokenizer = opened.tokenizer()
    tokens = list(tokenizer.encode(prompt).ids)
    new = run_folder(opened, tokens, max_new_tokens)
    text = tokenizer.decode(new)
    if output.as_json:
        print_json(Continuation(tokens, new, text))
    else:
        click.echo(text)
