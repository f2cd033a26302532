"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click

from devices import Device
from edgekv.cli.commands import check_extra
from edgekv.option import Option, check_place, find_device
from exporters.options import Cluster, RunOptions

DeviceOption = Annotated[
    Device, Option("Target chip: part number or name, such as SM8650; see `edgekv devices`.", parse=find_device)
]
OutputFolder = Annotated[Path, Option("The folder to write.", "-o --output")]
ForceOption = Annotated[bool, Option("Replace an existing output.")]
TextOption = Annotated[Path, Option("A UTF-8 text file.")]
EstimateOption = Annotated[
    bool, Option("Then simulate the speed on the chip, as edgekv estimate does; compiles once more per proxy chip.")
]
CheckpointOption = Annotated[str | None, Option("The checkpoint, if it has moved since the export.", parse=check_place)]
MovedAdapters = Annotated[
    Sequence[Path],
    Option(
        "An adapter of the bundle, if it has moved since the export; give all, in the export's order.",
        metavar="DIR",
    ),
]


def ready_to_run(run: RunOptions) -> RunOptions:
    """Where pieces run, with what workers tell printed on standard error.

    Raises:
        MissingExtraError: a cluster is wanted, and Dask is not installed.
    """
    if run.cluster is None:
        return run
    return replace(run, cluster=ready_cluster(run.cluster))


def ready_cluster(cluster: Cluster) -> Cluster:
    """As `ready_to_run`."""
    check_extra("--scheduler", "edgekv", "sweep")
    return replace(cluster, say=lambda line: click.echo(f"edgekv: {line}", err=True))
