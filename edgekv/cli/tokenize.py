"""`edgekv tokenize`: the tokens of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edgekv.cli.output import print_json
from edgekv.cli.prompt import PromptFileOption, PromptOption, read_prompt


class Output(msgspec.Struct, frozen=True):
    """The output of `--json`.

    Attributes:
        tokens: ids.
        pieces: the text of each token; U+FFFD stands for bytes of an incomplete character.
        count: number of tokens.
        context: context length of the bundle, in tokens.
    """

    tokens: list[int]
    pieces: list[str]
    count: int
    context: int


def tokenize(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the tokens of a text, as `edgekv generate` would run them.

    One line for each token: its id and its text, special tokens by name.
    """
    text = read_prompt(prompt, prompt_file)
    from edgekv.bundle import open_bundle
    from edgekv.text.prompt import PromptReader

    opened = open_bundle(bundle, verify=False)
    reader = PromptReader(opened, "sliding-window")
    tokens = reader.read(text)
    pieces = [reader.piece(token) for token in tokens]
    if as_json:
        print_json(Output(tokens, pieces, len(tokens), opened.manifest.context))
        return
    for token, piece in zip(tokens, pieces, strict=True):
        typer.echo(f"{token:>8}  {piece!r}")
    typer.echo(f"[{len(tokens)} tokens; the context holds {opened.manifest.context}]", err=True)
