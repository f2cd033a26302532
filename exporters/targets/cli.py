"""The group `edgekv bundle`: a bundle as the files that another runtime loads.

Each runtime's command is defined beside its exporter.
"""

from __future__ import annotations

from edgekv.cli.command import Group
from exporters.targets.genai.cli import bundle_genai
from exporters.targets.genie.cli import bundle_genie
from exporters.targets.geniex.cli import bundle_geniex

bundle = Group()
bundle.add_command(bundle_genai, "genai")
bundle.add_command(bundle_genie, "genie")
bundle.add_command(bundle_geniex, "geniex")
