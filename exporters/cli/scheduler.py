"""`--scheduler` of commands that can run on a Dask cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from edgekv.cli.commands import MissingExtraError
from edgekv.cli.extras import missing_packages
from edgekv.errors import UsageError
from edgekv.system import cache_folder
from exporters.progress import Progress

if TYPE_CHECKING:
    from exporters.sweep.carry import Where

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

SchedulerOption = Annotated[
    Optional[str],
    typer.Option(
        help="Send the work out: local for processes on this machine, or a Dask scheduler, tcp://HOST:PORT.",
        show_default="none: all in this process",
    ),
]
StoreOption = Annotated[
    Optional[str],
    typer.Option(
        help="With --scheduler: folder or fsspec URL of finished pieces, which all workers reach.",
        show_default="pieces in the cache directory",
    ),
]
DivideOption = Annotated[
    bool,
    typer.Option(
        "--divide-layers", help="Make each matrix a piece of its own: for large layers, whose integers stay the same."
    ),
]


def find_cluster(
    scheduler: str, store: str | None, cache_dir: Path | None, progress: Progress, *, divide: bool = False
) -> Where:
    """Where the pieces of a command run; with `divide` the matrices of a layer are pieces of their own.

    Raises:
        MissingExtraError: Dask is not installed.
    """
    if missing := missing_packages("edgekv", "sweep"):
        raise MissingExtraError(
            "--scheduler",
            got=f"no {', '.join(missing)}",
            expected="the packages of edgekv[sweep]",
            fix='Run pip install "edgekv[sweep]".',
        )
    from exporters.sweep.carry import Where

    return Where((cache_dir or cache_folder()).absolute(), store, scheduler, None, False, _say, progress, divide)


def refuse_with(on_cluster: bool, given: Mapping[str, bool]) -> None:
    """Refuse options that need `--scheduler`, or that do not go with it.

    Args:
        on_cluster: whether `--scheduler` is given.
        given: whether each such option is.

    Raises:
        UsageError: one is given.
    """
    for option in [name for name, wanted in given.items() if wanted]:
        if on_cluster:
            raise UsageError("--scheduler", got=f"it with {option}", expected="one of both", fix=f"Leave {option} out.")
        raise UsageError(option, got="it without --scheduler", expected="both", fix="Add --scheduler local.")


def _say(line: str) -> None:
    typer.echo(f"edgekv: {line}", err=True)
