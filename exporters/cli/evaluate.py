"""`edgekv eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

import edgekv
from edgekv.cli.engine_options import CpuModeOption, HtpOption
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.runtime import make_engine
from edgekv.text_file import read_text_file
from exporters.checkpoint.folded import transformed_as
from exporters.cli.options import JsonOption, MovedAdapters
from exporters.inspect import layer_lines, measure_layers, parse_budget, proposal_lines, propose
from exporters.inspect.evaluate import evaluate_windows, evaluation_windows, open_source
from exporters.inspect.page import check_page_path, write_page
from exporters.inspect.show import figures
from exporters.inspect.wikitext import Pages
from exporters.progress import shown
from exporters.quantize.recipe import Recipe, check_recipe_path

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)


def eval_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.")],
    engine: Annotated[str, typer.Option(help="Engine: cpu or htp; litert or tflite for TFLite graphs.")] = "cpu",
    cpu_mode: CpuModeOption = None,
    htp: HtpOption = None,
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
    html: Annotated[
        Optional[Path], typer.Option(help="Write a page with charts (.html): --layers, ranges, sizes and the cache.")
    ] = None,
    checkpoint: Annotated[Optional[str], typer.Option(help="The checkpoint, if it has moved since the export.")] = None,
    lora: MovedAdapters = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a bundle with the float32 reference of its checkpoint.

    Reports perplexity, top-1 agreement and SQNR on a text. --layers shows where the error arises; --suggest-recipe
    writes a recipe that spends a few more bytes where they reduce it most. With --cpu-mode exact16 or fast it also
    reports that mode's agreement with emulate.
    """
    content = read_text_file(text, "--text")
    budget = parse_budget("--size-budget", size_budget)
    if suggest_recipe is not None:
        check_recipe_path(suggest_recipe)
    if html is not None:
        check_page_path(html)
    by_layer = layers or html is not None or suggest_recipe is not None
    is_rendered = cpu_mode not in (None, "emulate")
    if is_rendered and by_layer:
        raise UsageError(
            "--cpu-mode",
            got=f"{cpu_mode} with --layers, --html or --suggest-recipe",
            expected="emulate, the only mode with the bundle's own results",
            fix="Leave it out.",
        )
    model = edgekv.load(bundle, engine=engine, cpu_mode=cpu_mode, htp=htp)
    emulated = edgekv.load(model.bundle) if is_rendered else None
    manifest = model.bundle.manifest
    source = open_source(manifest, checkpoint, lora or ())
    report = proposal = pages = None
    if word_perplexity:
        sink = () if manifest.sink is None else manifest.sink.tokens
        pages = Pages.read(source, content, manifest.context, tokens, sink)
        windows = pages.windows
    else:
        windows = evaluation_windows(source, content, manifest, tokens)
    with shown() as progress:
        if by_layer:
            tensors = transformed_as(model.bundle, source)
            if suggest_recipe is not None:
                inputs = [window.inputs for window in windows]
                proposal = propose(model.bundle, tensors, inputs, budget, progress)
            runner = make_engine(engine, bundle=model.bundle)
            report = measure_layers(model.bundle, runner, tensors, windows, text.name, progress, pages=pages)
            report, result = msgspec.structs.replace(report, proposal=proposal), report.evaluation
        else:
            result = evaluate_windows(
                model, source, windows, text.name, pages=pages, emulated=emulated, progress=progress
            )
    if html is not None and report is not None:
        write_page(html, model.bundle, report)
    if proposal is not None and suggest_recipe is not None:
        proposal.recipe(Recipe.of(manifest.recipe)).write(suggest_recipe)
    if as_json:
        print_json(report or result)
        return
    typer.echo(f"{result.tokens} tokens of {result.text} on {result.engine}")
    for figure in figures(result):
        typer.echo(f"  {figure}")
    if report is not None and (layers or suggest_recipe is not None):
        for line in layer_lines(report):
            typer.echo(line)
    if proposal is not None:
        for line in proposal_lines(proposal, str(suggest_recipe)):
            typer.echo(line)
