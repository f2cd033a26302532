"""`edgekv eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.cli.summary import engine_and_mode
from edgekv.errors import UsageError
from edgekv.machine.text_file import read_text_file
from edgekv.option import Option
from edgekv.runtime.load_options import EngineOptions
from exporters.cli.common import CheckpointOption, MovedAdapters, TextOption
from exporters.progress import progress_bars

_BUDGET = "1.2x"


@command
def eval_(
    bundle: BundleArgument,
    text: TextOption,
    engine: EngineOptions,
    output: Output,
    tokens: Annotated[int, Option("Maximum number of tokens to evaluate.", minimum=1)] = 4096,
    word_perplexity: Annotated[
        bool,
        Option(
            "The text is WikiText raw: measure whole pages, as many as --tokens has room for, and their word "
            "perplexity as lm-evaluation-harness defines it."
        ),
    ] = False,
    layers: Annotated[
        bool, Option("Report the SQNR of every layer and tensor, and advice for the worst ten.", group="Reports")
    ] = False,
    suggest_recipe: Annotated[
        Path | None,
        Option("Write a recipe file (.json) that gives int8 to the matrices that gain most.", group="Reports"),
    ] = None,
    size_budget: Annotated[
        str | None,
        Option(
            "Size limit of the weights for --suggest-recipe: a factor such as 1.2x, or bytes.",
            shown=_BUDGET,
            group="Reports",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        Option("Write a page with charts (.html): --layers, ranges, sizes and the cache.", group="Reports"),
    ] = None,
    checkpoint: CheckpointOption = None,
    lora: MovedAdapters = (),
) -> None:
    """Reports perplexity, top-1 agreement and SQNR on a text. --layers shows where the error arises; --suggest-recipe
    writes a recipe that spends a few more bytes where they reduce it most. The engine cpu computes as the HTP does
    (emulate); with --cpu-mode exact16 or fast, that mode's agreement with emulate is reported too.
    """
    import msgspec

    from edgekv.loading import open_model
    from edgekv.runtime import make_engine
    from exporters.checkpoint.folded import transformed_as
    from exporters.inspect import layer_lines, measure_layers, parse_budget, proposal_lines, propose
    from exporters.inspect.encoder import measure_encoder
    from exporters.inspect.evaluate import check_writes_text, evaluate_windows, evaluation_windows, open_source
    from exporters.inspect.held_out import MEASURED_TOKENS, HeldOutChat, measure_chat
    from exporters.inspect.page import check_page_path, write_page
    from exporters.inspect.show import figures
    from exporters.inspect.wikitext import Pages
    from exporters.quantize.recipe import Recipe, check_recipe_path
    from exporters.quantize.reference import Reference

    content = read_text_file(text, "--text")
    if size_budget is not None and suggest_recipe is None:
        expected, fix = "--suggest-recipe, whose recipe it limits", "Leave it out, or add --suggest-recipe FILE.json."
        raise UsageError("--size-budget", got="it alone", expected=expected, fix=fix)
    budget = parse_budget("--size-budget", size_budget or _BUDGET)
    if suggest_recipe is not None:
        check_recipe_path(suggest_recipe)
    if html is not None:
        check_page_path(html)
    by_layer = layers or html is not None or suggest_recipe is not None
    is_rendered = engine.cpu_mode not in (None, "emulate")
    if is_rendered and by_layer:
        raise UsageError(
            "--cpu-mode",
            got=f"{engine.cpu_mode} with --layers, --html or --suggest-recipe",
            expected="emulate, the only mode with the bundle's own results",
            fix="Leave it out.",
        )
    model = open_model(bundle, engine)
    emulated = open_model(model.bundle, EngineOptions()) if is_rendered else None
    manifest = model.bundle.manifest
    check_writes_text(model.bundle)
    source = open_source(manifest, checkpoint, lora)
    report = proposal = pages = None
    if word_perplexity:
        sink = () if manifest.sink is None else manifest.sink.tokens
        pages = Pages.read(source, content, manifest.context, tokens, sink)
        windows = pages.windows
    else:
        windows = evaluation_windows(source, content, manifest, tokens)
    sink = () if manifest.sink is None else manifest.sink.tokens
    bos = () if source.special.bos is None else (source.special.bos,)
    chat = HeldOutChat.of(source.tokenizer, source.chat)
    chat_windows = (
        [] if chat is None else chat.windows(manifest.context, sink or bos, min(tokens, MEASURED_TOKENS["chat"]))
    )
    exact = Reference(source, manifest.context)
    with progress_bars(output.is_quiet) as progress:
        if by_layer:
            tensors = transformed_as(model.bundle, source)
            if suggest_recipe is not None:
                inputs = [window.inputs for window in windows]
                proposal = propose(model.bundle, tensors, inputs, budget, progress)
            runner = make_engine(model.bundle, engine)
            report = measure_layers(model.bundle, runner, tensors, windows, text.name, progress, pages=pages)
            encoder = measure_encoder(model.bundle, source)
            report, result = msgspec.structs.replace(report, proposal=proposal, encoder=encoder), report.evaluation
        else:
            result = evaluate_windows(
                model, exact, windows, text.name, pages=pages, emulated=emulated, progress=progress
            )
        if chat_windows:
            inputs = [chat.window.inputs for chat in chat_windows]
            scored = (model.score(tokens.tolist()) for tokens in inputs)
            pairs = zip(exact.logits(inputs), scored, strict=True)
            result = msgspec.structs.replace(result, chat=measure_chat(chat_windows, pairs))
        if report is not None:
            report = msgspec.structs.replace(report, evaluation=result)
    if html is not None and report is not None:
        write_page(html, model.bundle, report)
    if proposal is not None and suggest_recipe is not None:
        proposal.recipe(Recipe.of(manifest.recipe)).write(suggest_recipe)
    if output.as_json:
        print_json(report or result)
        return
    click.echo(f"{result.tokens} tokens of {result.text} on {engine_and_mode(result.engine)}")
    for figure in figures(result):
        click.echo(f"  {figure}")
    if report is not None and (layers or suggest_recipe is not None):
        for line in layer_lines(report):
            click.echo(line)
    if proposal is not None:
        for line in proposal_lines(proposal, str(suggest_recipe)):
            click.echo(line)
