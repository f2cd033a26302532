"""`edgekv compare`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Optional

import typer

from edgekv.cli.engine_options import CpuModeOption
from edgekv.cli.output import print_json
from edgekv.text_file import read_text_file
from exporters.cli.options import JsonOption
from exporters.compare.comparison import ComparePlan, compare
from exporters.compare.opened import ContenderOptions, open_contender
from exporters.compare.show import comparison_lines
from exporters.progress import shown

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

_DEFAULT = ComparePlan()


def compare_(
    a: Annotated[
        Path,
        typer.Argument(help="A bundle, a checkpoint, a GGUF file, or a folder of onnxruntime-genai or OpenVINO."),
    ],
    b: Annotated[Path, typer.Argument(help="Another one, with the same vocabulary.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.")],
    engine: Annotated[str, typer.Option(help="Engine of bundles: cpu or htp.")] = "cpu",
    cpu_mode: CpuModeOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to predict.")] = _DEFAULT.tokens,
    window: Annotated[
        int, typer.Option(min=2, help="Most tokens of a window; at most the smaller context.")
    ] = _DEFAULT.window,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the timed prompts.")] = _DEFAULT.prompt,
    new: Annotated[
        int, typer.Option(min=0, help="Tokens generated after each of them; 0 measures no speed.")
    ] = _DEFAULT.new,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each model.")] = _DEFAULT.turns,
    threads: Annotated[Optional[int], typer.Option(min=1, help="Threads of one operation, of all runtimes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two models on one text: KL divergence, top-1 agreement, perplexity, size and speed.

    A GGUF file runs through llama-cpp-python, other folders through their own runtimes, where installed; a checkpoint
    (and a GGUF file without llama-cpp-python) in float32, without speed. Speeds are medians of turns that alternate.
    """
    content = read_text_file(text, "--text")
    plan = ComparePlan(tokens, window, prompt, new, turns)
    options = ContenderOptions(engine, cpu_mode, threads, max(window, prompt + new + 2))
    with closing(open_contender(a, options)) as first, closing(open_contender(b, options)) as second:
        with shown() as progress:
            found = compare(first, second, content, text.name, plan, progress)
        if as_json:
            print_json(found)
            return
        for line in comparison_lines(found):
            typer.echo(line)
