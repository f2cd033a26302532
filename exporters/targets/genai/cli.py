"""`edgekv bundle genai` and `edgekv genai run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec

from devices import find
from edgekv.cli.command import NOTHING, Given, Group, command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup
from edgekv.text.params import DEFAULT_MAX_NEW_TOKENS
from exporters.cli.common import ForceOption, OutputFolder
from exporters.cli.next_step import next_command
from exporters.progress import progress_bars
from exporters.targets.genai.options import GenaiOptions

genai = Group()


class Continuation(msgspec.Struct, frozen=True):
    """What `edgekv genai run --json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str


@command
def bundle_genai(
    bundle: BundleArgument,
    target: OutputFolder,
    output: Output,
    choices: Annotated[Given[GenaiOptions], OptionGroup("Folder")] = NOTHING,
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


@genai.command("run")
def run(
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
