"""What `edgekv generate` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import msgspec

from edgekv.cli.output import Output, print_json
from edgekv.cli.summary import beam_summary, defaults_line, expert_line, summary
from edgekv.cli.waiting import after_prefill

if TYPE_CHECKING:
    from edgekv.engine import BeamResult, BeamSequence, BeamStats, Generation, GenerationStats
    from edgekv.runtime import ExpertStats


class TextOutput(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stats: GenerationStats
    experts: ExpertStats | None = None


class BeamOutput(msgspec.Struct, frozen=True):
    """What `--json` prints with `--num-beams`."""

    prompt_tokens: list[int]
    sequences: list[BeamSequence]
    stats: BeamStats


def print_stream(
    generation: Generation, output: Output, ignored: list[str], experts: Callable[[], ExpertStats | None]
) -> None:
    """Stream the text, then the statistics; `ignored` are the fields of generation_config.json without support."""
    with generation:
        if output.as_json:
            tokens = list(generation)
            text = "".join(token.text for token in tokens)
            ids = [token.id for token in tokens]
            print_json(TextOutput(list(generation.prompt), ids, text, generation.stats, experts()))
            return
        try:
            for token in after_prefill(generation, output):
                click.echo(token.text, nl=False)
        finally:
            click.echo()
            line = defaults_line(generation.stats, ignored)
            if line is not None:
                output.note(line)
            output.note(summary(generation.stats))
            if (stats := experts()) is not None:
                output.note(expert_line(stats))


def print_sequences(result: BeamResult, output: Output) -> None:
    """Print the texts of a beam search, best first, and the statistics."""
    if output.as_json:
        print_json(BeamOutput(list(result.prompt), list(result.sequences), result.stats))
        return
    for sequence in result.sequences:
        click.echo(sequence.text)
        output.note(f"[score {sequence.score:.4f}: {len(sequence.tokens)} tokens, ended by {sequence.stop_reason}]")
    output.note(beam_summary(result.stats))
