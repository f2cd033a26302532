"""`edgekv tokenize`: the tokens of a text."""

from __future__ import annotations

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.cli.prompt import PromptOptions


class TokenizedText(msgspec.Struct, frozen=True):
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


@command
def tokenize(bundle: BundleArgument, prompt: PromptOptions, output: Output) -> None:
    """One line for each token: its id and its text, special tokens by name."""
    text = prompt.read()
    from edgekv.bundle import open_bundle
    from edgekv.text.texts import Texts

    opened = open_bundle(bundle, verify=False)
    reader = Texts(opened, "sliding-window")
    tokens = reader.read(text)
    pieces = [reader.piece(token) for token in tokens]
    if output.as_json:
        print_json(TokenizedText(tokens, pieces, len(tokens), opened.manifest.context))
        return
    for token, piece in zip(tokens, pieces, strict=True):
        click.echo(f"{token:>8}  {piece!r}")
    output.note(f"[{len(tokens)} tokens; the context holds {opened.manifest.context}]")
