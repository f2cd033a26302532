"""A bundle as the folder that Qualcomm's Genie loads, and Genie itself, run in a child process."""

from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.folder import (
    GENIE_MANIFEST,
    GenieFolder,
    GenieGraph,
    GenieManifest,
    GenieSink,
    open_genie_folder,
)
from exporters.targets.genie.plan import GenieOptions
from exporters.targets.genie.write import write_genie

__all__ = [
    "GENIE_MANIFEST",
    "GenieDialog",
    "GenieFolder",
    "GenieGraph",
    "GenieManifest",
    "GenieOptions",
    "GenieSink",
    "open_genie_folder",
    "write_genie",
]
