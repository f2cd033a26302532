"""The group `edgekv bundle`: a bundle as the files that another runtime loads.

Each runtime's command is defined beside its exporter and added here with `bundle.command(NAME)(function)`.
"""

from __future__ import annotations

import typer

from exporters.targets.genai.cli import bundle_genai
from exporters.targets.genie.cli import bundle_genie
from exporters.targets.geniex.cli import bundle_geniex

bundle = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Write a bundle as the files that another runtime loads."
)


@bundle.callback()
def _bundle() -> None:
    pass


bundle.command("genai")(bundle_genai)
bundle.command("genie")(bundle_genie)
bundle.command("geniex")(bundle_geniex)
