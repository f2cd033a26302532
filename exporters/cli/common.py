"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from devices import Device
from edgekv.option import Option, find_device

DeviceOption = Annotated[
    Device, Option("Target chip: part number or name, such as SM8650; see `edgekv devices`.", parse=find_device)
]
OutputFolder = Annotated[Path, Option("The folder to write.", "-o --output")]
CacheDirOption = Annotated[
    Path | None,
    Option("Cache directory for resuming interrupted work.", shown="EDGEKV_CACHE_DIR, or the user's cache directory"),
]
ForceOption = Annotated[bool, Option("Replace an existing output.")]
TextOption = Annotated[Path, Option("A UTF-8 text file.")]
CheckpointOption = Annotated[str | None, Option("The checkpoint, if it has moved since the export.")]
MovedAdapters = Annotated[
    Sequence[Path],
    Option(
        "An adapter of the bundle, if it has moved since the export; give all, in the export's order.",
        metavar="DIR",
    ),
]
