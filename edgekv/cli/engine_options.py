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
_HTP_HELP = (
    "Options of the engine htp, KEY=VALUE,...: performance (burst, balanced, power_saver, ...), rpc-latency in us, "
    "priority (low to high), vtcm in MiB, optimization (1 to 3), device (its number), shared-memory "
    "(yes, no or auto) and mapped-weights (yes or no)."
)

HtpOption = Annotated[Optional[str], typer.Option("--htp", help=_HTP_HELP, show_default=False)]
_REPRODUCIBLE_HELP = (
    "Give a prompt the same answer whatever is cached of it. On a CPU only whole windows of prompts are then kept, and "
    "the rest is computed again."
)
ReproducibleOption = Annotated[bool, typer.Option("--reproducible", help=_REPRODUCIBLE_HELP)]
LoraOption = Annotated[
    Optional[list[str]],
    typer.Option(
        "--lora",
        metavar="NAME[=SCALE]",
        help="Adapter of a bundle with slots, which `edgekv lora add` added; repeat for several at once.",
        show_default=False,
    ),
]
OnFullOption = Annotated[
    str,
    typer.Option(
        "--on-full",
        help="When a conversation fills the context: drop-oldest leaves its oldest turns out; stop refuses more of it.",
    ),
]
TalkingModeOption = Annotated[Optional[str], typer.Option("--cpu-mode", help=_HELP, show_default="fast")]


def joined(lora: list[str] | None) -> str | None:
    """The adapters of `--lora` as `Model.generate` takes them."""
    return ",".join(lora) if lora else None


def talking_mode(engine: str, asked: str | None) -> str | None:
    """The mode of the commands that generate, and of `bench`: on the CPU `fast`, if none was asked for.

    Without the packages that it needs it is `emulate`, with a note on standard error.
    """
    if asked is not None or engine != "cpu":
        return asked
    from edgekv.graphs.cpu_mode import BUILDING_EXTRA, can_build  # slow to import

    if can_build():
        return "fast"
    typer.echo(f'edgekv: note: pip install "edgekv[{BUILDING_EXTRA}]" answers several times as fast', err=True)
    return "emulate"
