"""`edgekv pieces`, and the hint to resume that an interrupted export prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import click
import msgspec

from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.option import Option, OptionGroup
from exporters.options import RunOptions
from exporters.progress import Progress

_WITHOUT_PIECES = ("prepare", "hash weights", "verify bundle", "seal")
"""Steps whose results are not kept."""


class PiecesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The finished pieces in a cache directory.

    Attributes:
        folder: their folder.
        pieces: their number.
        bytes: total size of their files.
        cleared: whether they were removed.
    """

    folder: str
    pieces: int
    bytes: int
    cleared: bool


@command
def pieces(
    run: Annotated[RunOptions, OptionGroup("Run", only=("cache_dir",))],
    output: Output,
    clear: Annotated[bool, Option("Remove all of them.")] = False,
) -> None:
    """Finished pieces are kept for --resume until an export or compilation is complete."""
    from exporters.pipeline.store import store_in  # slow to import, as in other commands

    store = store_in(run.cache_dir)
    report = PiecesReport(folder=str(store.folder), pieces=store.pieces, bytes=store.bytes, cleared=clear)
    if clear:
        store.clear()
    if output.as_json:
        print_json(report)
        return
    click.echo(f"{store.folder}: {report.pieces} pieces, {report.bytes / 1e6:.1f} MB{', removed' if clear else ''}")


@contextmanager
def resumable(progress: Progress) -> Iterator[Progress]:
    """Print how to resume if the work fails or is interrupted after a piece of it was finished."""
    layers, has_pieces = 0, False

    def watched(stage: str, done: int, total: int) -> None:
        nonlocal layers, has_pieces
        layers = done if stage == "quantize" else layers
        has_pieces = has_pieces or (done > 0 and stage not in _WITHOUT_PIECES)
        progress(stage, done, total)

    try:
        yield watched
    except BaseException:
        if layers or has_pieces:
            finished = f"{layers} layers are finished" if layers else "Some pieces are finished"
            click.echo(f"{finished}. Run the same command with --resume to continue.", err=True)
        raise
