"""`edgekv compare`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import click

from edgekv.cli.command import command
from edgekv.cli.model import interactive
from edgekv.cli.output import Output, print_json
from edgekv.machine.text_file import read_text_file
from edgekv.option import Argument, OptionGroup
from edgekv.runtime.load_options import EngineOptions
from exporters.cli.common import TextOption
from exporters.compare.plan import ComparePlan
from exporters.progress import progress_bars


@command
def compare_(
    a: Annotated[Path, Argument("A bundle, a checkpoint, a GGUF file, or a folder of onnxruntime-genai or OpenVINO.")],
    b: Annotated[Path, Argument("Another one, with the same vocabulary.")],
    text: TextOption,
    plan: Annotated[ComparePlan, OptionGroup("Measure")],
    engine: Annotated[EngineOptions, OptionGroup("Engine", only=("engine", "cpu_mode", "threads"))],
    output: Output,
) -> None:
    """KL divergence, top-1 agreement, perplexity, size and speed. A GGUF file runs through llama-cpp-python, other
    folders through their own runtimes, where installed; a checkpoint (and a GGUF file without llama-cpp-python) in
    float32, without speed. Bundles on the engine cpu run in the mode fast; --cpu-mode emulate computes as the HTP does.
    Speeds are medians of alternating turns.
    """
    from exporters.compare.comparison import compare
    from exporters.compare.opened import ContenderOptions, open_contender
    from exporters.compare.show import comparison_lines

    content = read_text_file(text, "--text")
    engine = interactive(engine)
    options = ContenderOptions(engine.engine, engine.cpu_mode, engine.threads, plan.max_tokens)
    with closing(open_contender(a, options)) as first, closing(open_contender(b, options)) as second:
        with progress_bars(output.is_quiet) as progress:
            comparison = compare(first, second, content, text.name, plan, progress)
        if output.as_json:
            print_json(comparison)
            return
        for line in comparison_lines(comparison):
            click.echo(line)
