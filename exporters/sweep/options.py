"""Options of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgekv.machine.system import parse_bytes
from edgekv.option import Option, check_place


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Where pieces are kept, and what is recommended.

    Pieces are in `pieces` in the folder of results, if `store` does not name another folder or an fsspec URL.
    """

    budget_bytes: Annotated[
        int | None, Option("Size limit of the recommended bundle, such as 600MB.", "--size-budget", parse=parse_bytes)
    ] = None
    estimate: Annotated[
        bool,
        Option(
            "Also simulate the speed of each combination, as edgekv estimate does: minutes for each chip and recipe."
        ),
    ] = False
    store: Annotated[
        str | None,
        Option(
            "Shared folder or fsspec URL of the pieces, readable by all workers, such as s3://bucket/sweeps.",
            parse=check_place,
            shown="OUTPUT/pieces",
            group="Run",
        ),
    ] = None
    prune_days: Annotated[
        float | None,
        Option(
            "Afterwards remove pieces unused by sweeps of this folder for this many days.",
            "--prune",
            minimum=0,
            group="Run",
        ),
    ] = None
