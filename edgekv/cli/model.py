"""What commands that run a bundle have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click

from edgekv.option import Argument, Option
from edgekv.runtime.load_options import EngineOptions

BundleArgument = Annotated[Path, Argument("A bundle's folder.")]
LoraOption = Annotated[
    Sequence[str],
    Option(
        "Adapter of a bundle with slots, which `edgekv lora add` added; repeat for several at once.",
        metavar="NAME[=SCALE]",
    ),
]

CONVERSATION_CACHE = ("kv_update", "reserve", "kv_growth", "reproducible")
"""The fields of `CacheOptions` for conversations: these drop whole turns where others drop tokens."""


def joined(lora: Sequence[str]) -> str | None:
    """The adapters of `--lora` as `Model.generate` takes them."""
    return ",".join(lora) or None


def interactive(engine: EngineOptions) -> EngineOptions:
    """The engine of commands that generate, and of `bench`: on the CPU in the mode `fast`, if none was asked for.

    Without the packages that it needs it is `emulate`, with a note on standard error.
    """
    if engine.engine != "cpu" or engine.cpu_mode is not None:
        return engine
    from edgekv.graphs.cpu_mode import BUILDING_EXTRA, can_build  # slow to import

    if can_build():
        return replace(engine, cpu_mode="fast")
    click.echo(f'edgekv: note: pip install "edgekv[{BUILDING_EXTRA}]" answers several times as fast', err=True)
    return replace(engine, cpu_mode="emulate")
