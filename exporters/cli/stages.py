"""`edgekv stages`, and the hint to resume that an interrupted export prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from edgekv.cli.output import print_json
from exporters.pipeline.store import store_in
from exporters.progress import Progress

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)


class StagesReport(msgspec.Struct, frozen=True, kw_only=True):
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


def stages(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
    cache_dir: Annotated[
        Optional[Path],
        typer.Option(help="The cache directory.", show_default="EDGEKV_CACHE_DIR, or the user's cache directory"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List or remove the finished pieces of interrupted exports and compilations.

    They are kept for --resume until the export or compilation is complete.
    """
    store = store_in(cache_dir)
    found = StagesReport(folder=str(store.folder), pieces=store.pieces, bytes=store.bytes, cleared=clear)
    if clear:
        store.clear()
    if as_json:
        print_json(found)
        return
    typer.echo(f"{store.folder}: {found.pieces} pieces, {found.bytes / 1e6:.1f} MB{', removed' if clear else ''}")


@contextmanager
def resumable(progress: Progress) -> Iterator[Progress]:
    """Print how to resume if the export fails or is interrupted after a layer was finished."""
    finished = 0

    def watched(stage: str, done: int, total: int) -> None:
        nonlocal finished
        finished = done if stage == "quantize" else finished
        progress(stage, done, total)

    try:
        yield watched
    except BaseException:
        if finished:
            typer.echo(f"{finished} layers are finished. Run the same command with --resume to continue.", err=True)
        raise
