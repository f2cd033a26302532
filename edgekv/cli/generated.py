"""What `edgekv generate` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import typer

from edgekv.cli.output import print_json
from edgekv.cli.summary import beam_summary, defaults_line, summary

if TYPE_CHECKING:
    from edgekv.engine import BeamResult, BeamSequence, BeamStats, Generation, GenerationStats


class Output(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stats: GenerationStats


class BeamOutput(msgspec.Struct, frozen=True):
    """What `--json` prints with `--num-beams`."""

    prompt_tokens: list[int]
    sequences: list[BeamSequence]
    stats: BeamStats


def print_stream(generation: Generation, as_json: bool, ignored: list[str]) -> None:
    """Stream the text, then the statistics; `ignored` are the fields of generation_config.json without support."""
    with generation:
        if as_json:
            tokens = list(generation)
            text = "".join(token.text for token in tokens)
            ids = [token.id for token in tokens]
            print_json(Output(list(generation.prompt), ids, text, generation.stats))
            return
        try:
            for token in generation:
                typer.echo(token.text, nl=False)
        finally:
            typer.echo()
            line = defaults_line(generation.stats, ignored)
            if line is not None:
                typer.echo(line, err=True)
            typer.echo(summary(generation.stats), err=True)


def print_sequences(result: BeamResult, as_json: bool) -> None:
    """Print the texts of a beam search, best first, and the statistics."""
    if as_json:
        print_json(BeamOutput(list(result.prompt), list(result.sequences), result.stats))
        return
    for sequence in result.sequences:
        typer.echo(sequence.text)
        typer.echo(
            f"[score {sequence.score:.4f}: {len(sequence.tokens)} tokens, ended by {sequence.stop_reason}]", err=True
        )
    typer.echo(beam_summary(result.stats), err=True)
