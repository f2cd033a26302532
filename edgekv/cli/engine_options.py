"""Options of the engines that several commands have."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

CpuModeOption = Annotated[
    Optional[str],
    typer.Option(
        "--cpu-mode",
        help="How the engine cpu computes: emulate rounds every result as the HTP does; exact16 multiplies the "
        "bundle's integers by activations of 16 bits; fast by activations of 8 bits.",
        show_default="emulate",
    ),
]
