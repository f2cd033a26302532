"""A bundle as the folder that Qualcomm's Genie loads, and Genie itself, run in a child process."""

from exporters.genie.dialog import GenieDialog
from exporters.genie.folder import GENIE_MANIFEST, GenieFolder, GenieGraph, GenieManifest, open_genie_folder
from exporters.genie.plan import GenieOptions
from exporters.genie.write import write_genie

__all__ = [
    "GENIE_MANIFEST",
    "GenieDialog",
    "GenieFolder",
    "GenieGraph",
    "GenieManifest",
    "GenieOptions",
    "open_genie_folder",
    "write_genie",
]
