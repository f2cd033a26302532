"""Options of the engines that several commands have."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

_HELP = (
    "How the engine cpu computes: emulate rounds every result as the HTP does; exact16 multiplies the bundle's "
    "integers by activations of 16 bits; fast by activations of 8 bits."
)

CpuModeOption = Annotated[Optional[str], typer.Option("--cpu-mode", help=_HELP, show_default="emulate")]
TalkingModeOption = Annotated[Optional[str], typer.Option("--cpu-mode", help=_HELP, show_default="fast")]


def talking_mode(engine: str, asked: str | None) -> str | None:
    """The mode of a command whose user waits for the text: `fast` on the CPU if none was asked for."""
    return "fast" if asked is None and engine == "cpu" else asked
