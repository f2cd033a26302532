"""`edgekv rerank`: documents by how well they fit a query."""

from __future__ import annotations

from typing import Annotated

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.embed import FileOption, TextOption, TruncateOption, read_texts
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.option import Option
from edgekv.runtime.load_options import EngineOptions


class RankedText(msgspec.Struct, frozen=True):
    """A document of `--json`: its place among the documents, its score and its text."""

    index: int
    score: float
    text: str


class Ranking(msgspec.Struct, frozen=True):
    """The output of `--json`: the documents, best first."""

    documents: list[RankedText]


@command
def rerank(
    bundle: BundleArgument,
    engine: EngineOptions,
    output: Output,
    query: Annotated[str, Option("The query.")],
    text: TextOption = (),
    file: FileOption = None,
    instruction: Annotated[
        str | None, Option("Task instruction, if the model's template takes one.", shown="the model's")
    ] = None,
    top_n: Annotated[int | None, Option("Print only the best N documents.", minimum=1, shown="all")] = None,
    truncate: TruncateOption = False,
) -> None:
    """A line for each document, best first: its score, its number from 0, and its text."""
    texts = read_texts(text, file)
    from edgekv.loading import open_model  # imports the runtime, which --help does not need

    with open_model(bundle, engine) as model:
        ranked = model.rerank(query, texts, instruction=instruction, top_n=top_n, truncate=truncate)
    if output.as_json:
        print_json(Ranking([RankedText(document.index, document.score, texts[document.index]) for document in ranked]))
        return
    for document in ranked:
        click.echo(f"{document.score:.6f}\t{document.index}\t{texts[document.index]}")
