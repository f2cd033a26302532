"""`--scheduler` of commands that can run on a Dask cluster."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from edgekv.cli.commands import MissingExtraError
from edgekv.cli.extras import missing_packages
from edgekv.errors import UsageError
from exporters.options import Cluster

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
        help="Folder or fsspec URL of finished pieces, which all workers reach; they stay there.",
        show_default="pieces in the cache directory",
    ),
]
DivideOption = Annotated[
    bool,
    typer.Option(
        "--divide-layers", help="Make each matrix a piece of its own: for large layers, whose integers stay the same."
    ),
]


def find_cluster(scheduler: str | None, *, divide: bool = False) -> Cluster | None:
    """Where the pieces of a command are done; None without `--scheduler`: in this process.

    Raises:
        UsageError: `--divide-layers` without `--scheduler`.
        MissingExtraError: Dask is not installed.
    """
    if scheduler is None:
        if divide:
            fix = "Add --scheduler local."
            raise UsageError("--divide-layers", got="it without --scheduler", expected="both", fix=fix)
        return None
    if missing := missing_packages("edgekv", "sweep"):
        raise MissingExtraError(
            "--scheduler",
            got=f"no {', '.join(missing)}",
            expected="the packages of edgekv[sweep]",
            fix='Run pip install "edgekv[sweep]".',
        )
    return Cluster(scheduler, say=_say, divide=divide)


def _say(line: str) -> None:
    typer.echo(f"edgekv: {line}", err=True)
