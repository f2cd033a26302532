"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

DeviceOption = Annotated[
    str, typer.Option("--device", help="Target chip: part number or name, such as SM8650; see `edgekv devices`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CacheOption = Annotated[
    Optional[Path],
    typer.Option(
        "--cache-dir",
        help="Cache directory for resuming interrupted work.",
        show_default="EDGEKV_CACHE_DIR, or the user's cache directory",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
MovedAdapters = Annotated[
    Optional[list[Path]],
    typer.Option(
        "--lora",
        metavar="DIR",
        help="An adapter of the bundle, if it has moved since the export; give all, in the export's order.",
    ),
]
