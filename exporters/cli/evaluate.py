"""`edgekv eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

import edgekv
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.runtime import make_engine
from edgekv.text_file import read_text_file
from exporters.checkpoint.folded import transformed
from exporters.cli.options import JsonOption
from exporters.inspect import layer_lines, measure_layers, parse_budget, proposal_lines, propose
from exporters.inspect.evaluate import evaluate, evaluate_pages, evaluation_windows, open_source
from exporters.inspect.wikitext import Pages
from exporters.progress import shown
from exporters.quantize.recipe import Recipe, check_recipe_path

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)


def eval_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.")],
    engine: Annotated[str, typer.Option(help="Engine: cpu or htp; litert or tflite for TFLite graphs.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to evaluate.")] = 4096,
    word_perplexity: Annotated[
        bool,
        typer.Option(
            "--word-perplexity",
            help="The text is WikiText raw: measure whole pages, as many as --tokens has room for, and their word "
            "perplexity as lm-evaluation-harness defines it.",
        ),
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Report the SQNR of every layer and tensor, and advice for the worst ten.")
    ] = False,
    suggest_recipe: Annotated[
        Optional[Path],
        typer.Option(help="Write a recipe file (.json) that gives int8 to the matrices that gain most."),
    ] = None,
    size_budget: Annotated[
        str, typer.Option(help="Size limit of the weights for --suggest-recipe: a factor such as 1.2x, or bytes.")
    ] = "1.2x",
    checkpoint: Annotated[Optional[str], typer.Option(help="The checkpoint, if it has moved since the export.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a bundle with the float32 reference of its checkpoint.

    Reports perplexity, top-1 agreement and SQNR on a text. --layers shows where the error arises; --suggest-recipe
    writes a recipe that spends a few more bytes where they reduce it most.
    """
    content = read_text_file(text, "--text")
    budget = parse_budget("--size-budget", size_budget)
    if suggest_recipe is not None:
        check_recipe_path(suggest_recipe)
    if word_perplexity and (layers or suggest_recipe is not None):
        found = "--word-perplexity with --layers or --suggest-recipe"
        raise UsageError("options", got=found, expected="one of them", fix="Run eval twice.")
    model = edgekv.load(bundle, engine=engine)
    manifest = model.bundle.manifest
    source = open_source(manifest, checkpoint)
    report = proposal = None
    with shown() as progress:
        if layers or suggest_recipe is not None:
            windows = evaluation_windows(source, content, manifest, tokens)
            tensors = transformed(source, manifest.recipe)
            if suggest_recipe is not None:
                proposal = propose(model.bundle, tensors, windows, budget, progress)
            runner = make_engine(engine, bundle=model.bundle)
            report = measure_layers(model.bundle, runner, tensors, windows, text.name, progress)
            report, result = msgspec.structs.replace(report, proposal=proposal), report.evaluation
        elif word_perplexity:
            sink = () if manifest.sink is None else manifest.sink.tokens
            pages = Pages.read(source, content, manifest.context, tokens, sink)
            result = evaluate_pages(model, source, pages, text.name, progress=progress)
        else:
            result = evaluate(model, source, content, text.name, tokens=tokens, progress=progress)
    if proposal is not None and suggest_recipe is not None:
        proposal.recipe(Recipe.of(manifest.recipe)).write(suggest_recipe)
    if as_json:
        print_json(report or result)
        return
    typer.echo(f"{result.tokens} tokens of {result.text} on {result.engine}")
    error = result.perplexity_ratio_error
    typer.echo(f"  perplexity      {result.perplexity:.4f}, {result.perplexity_ratio:.5f} +- {error:.5f} x reference")
    typer.echo(f"  reference       {result.reference_perplexity:.4f} (float32)")
    typer.echo(f"  KL divergence   {result.kl_nats:.5f} nats a token")
    typer.echo(f"  top-1 agreement {result.top1_agreement:.2%}")
    least, first = result.least_token_sqnr_db, result.first_sqnr_db
    apart = "" if first is None else f", {first:.1f} at position 0"
    typer.echo(f"  SQNR            {result.token_sqnr_db:.1f} dB per token, {least:.1f} at least{apart}")
    if (words := result.words) is not None:
        typer.echo(
            f"  word perplexity {words.perplexity:.4f}, {words.ratio:.5f} +- {words.ratio_error:.5f} x reference"
        )
        typer.echo(f"  reference       {words.reference_perplexity:.4f} (float32)")
        typer.echo(f"  {words.words:,} words, {words.pages} of {words.pages_in_text} pages")
    if report is not None:
        for line in layer_lines(report):
            typer.echo(line)
    if proposal is not None:
        for line in proposal_lines(proposal, str(suggest_recipe)):
            typer.echo(line)
