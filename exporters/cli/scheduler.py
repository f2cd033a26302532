"""`--scheduler` of commands that can run on a Dask cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from edgekv.cli.commands import MissingExtraError
from edgekv.cli.extras import missing_packages
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


def find_cluster(scheduler: str, store: str | None, cache_dir: Path | None, progress: Progress) -> Where:
    """Where the pieces of a command run.

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

    return Where((cache_dir or cache_folder()).absolute(), store, scheduler, None, False, _say, progress)


def _say(line: str) -> None:
    typer.echo(f"edgekv: {line}", err=True)
