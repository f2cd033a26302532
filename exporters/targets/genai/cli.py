"""`edgekv bundle genai` and `edgekv genai run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import msgspec
import typer

from devices import find
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from exporters.cli.options import ForceOption, JsonOption

if TYPE_CHECKING:
    from edgekv.bundle import Bundle
    from exporters.targets.genai.folder import GenaiOptions

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

genai = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run a folder of `edgekv bundle genai` with onnxruntime-genai."
)


@genai.callback()
def _genai() -> None:
    pass


class Output(msgspec.Struct, frozen=True):
    """What `edgekv genai run --json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str


def bundle_genai(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.", show_default=False)],
    engine: Annotated[str, typer.Option(help="Engine that runs the graphs: htp or cpu.")] = "htp",
    device: Annotated[
        Optional[str],
        typer.Option(help="Target of the engine htp: part number or name.", show_default="the bundle's"),
    ] = None,
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Write one binary with one copy of the weights. It runs on a Snapdragon, not on the emulator.",
        ),
    ] = False,
    pad_token_id: Annotated[
        Optional[int],
        typer.Option(
            help="Padding token: an id that no prompt contains.", show_default="the bundle's own, or an unused one"
        ),
    ] = None,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="Do not compare the graphs with the bundle's graphs.")
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the folder that onnxruntime-genai loads.

    Its graphs keep the heads of a layer in one tensor and must compute the same integers as the bundle's graphs.
    The cache must be u8.
    """
    from edgekv.bundle import open_bundle
    from exporters.progress import shown
    from exporters.targets.genai.folder import write_folder

    opened = open_bundle(bundle)
    options = _options(opened, engine, device, pad_token_id, share_weights=share_weights, check=not skip_check)
    with shown() as progress:
        written = write_folder(opened, output, options, force=force, progress=progress)
    if as_json:
        print_json(written)
        return
    held = sum(record.bytes for record in written.files.values())
    where = "the CPU" if written.soc is None else written.soc
    typer.echo(f"{output}: for {where}, context {written.context}, {held / 1e6:.1f} MB")
    typer.echo(f"  prompts run in windows of {written.window} tokens, padded with token {written.pad_token}")
    if written.sink:
        text = opened.tokenizer().decode(written.sink, skip_special_tokens=False)
        typer.echo(f"  the graphs begin every text with {text!r}, which prompts leave out")
    if written.left_out:
        typer.echo(f"  left out: {', '.join(written.left_out)}, since onnxruntime-genai decodes one token a step")
    typer.echo(
        "  the graphs return the same integers as the bundle's" if written.checked else "  not compared with the bundle"
    )


@genai.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="A folder written by `edgekv bundle genai`.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt in onnxruntime-genai on this machine, greedily."""
    from exporters.targets.genai.run import open_folder, run_folder

    opened = open_folder(folder)
    tokenizer = opened.tokenizer()
    tokens = list(tokenizer.encode(prompt).ids)
    new = run_folder(opened, tokens, max_new_tokens)
    text = tokenizer.decode(new)
    if as_json:
        print_json(Output(tokens, new, text))
    else:
        typer.echo(text)


def _options(
    bundle: Bundle, engine: str, device: str | None, pad_token: int | None, *, share_weights: bool, check: bool
) -> GenaiOptions:
    from exporters.targets.genai.folder import GenaiOptions

    if engine not in ("htp", "cpu"):
        raise UsageError("--engine", got=repr(engine), expected="htp or cpu", fix="Use htp.")
    if engine == "cpu" and device is not None:
        raise UsageError("--device", got=f"{device} with the engine cpu", expected="none", fix="Leave it out.")
    target = None if engine == "cpu" else find(device or bundle.manifest.device)
    return GenaiOptions(target, pad_token, share_weights, check)
