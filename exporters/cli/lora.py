"""`edgekv lora`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from edgekv.cli.command import Group
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.option import Argument, Option
from exporters.cli.common import ForceOption

if TYPE_CHECKING:
    from edgekv.bundle import LoraAdapter, LoraRecord

lora = Group()

_SHOWN = 5


class LoraList(msgspec.Struct, frozen=True):
    """What `edgekv lora ls --json` prints."""

    adapters: list[LoraRecord]


@lora.command()
def add(
    bundle: BundleArgument,
    adapter: Annotated[Path, Argument("A LoRA adapter as peft saves it.", metavar="ADAPTER_DIR")],
    name: Annotated[str, Option("Name for requests: letters, digits, ., _ and -.")],
    output: Output,
    scale: Annotated[float, Option("Multiplies what the adapter adds.")] = 1.0,
    force: ForceOption = False,
) -> None:
    """Quantize an adapter and add it to a bundle that was exported with --lora-slots.

    Graphs and compiled binaries stay as they are.
    """
    from edgekv.bundle import open_bundle
    from exporters.checkpoint.lora import AdapterChoice
    from exporters.lora.add import add_lora

    choice = AdapterChoice.parse("--scale", f"{adapter}={scale!r}" if adapter.is_dir() else str(adapter))
    added = add_lora(open_bundle(bundle), choice, name, force=force)
    if output.as_json:
        print_json(added.record)
        return
    click.echo(_line(added))
    for matrix in added.record.clipped[:_SHOWN]:
        click.echo(
            f"  layer {matrix.layer}, {matrix.target}: {matrix.elements:,} elements clipped ({matrix.share:.2%}), "
            f"the largest {matrix.reach:.2f} times the range"
        )
    if (more := len(added.record.clipped) - _SHOWN) > 0:
        click.echo(f"  and {more} more matrices; export with a larger --lora-reach")


@lora.command("ls")
def list_(bundle: BundleArgument, output: Output) -> None:
    """List the adapters of a bundle."""
    from edgekv.bundle import lora_adapters, open_bundle

    adapters = lora_adapters(open_bundle(bundle, verify=False))
    if output.as_json:
        print_json(LoraList([adapter.record for adapter in adapters]))
        return
    for adapter in adapters:
        click.echo(_line(adapter))
    if not adapters:
        click.echo("no adapters")


@lora.command()
def rm(bundle: BundleArgument, name: Annotated[str, Argument("Name of the adapter.")]) -> None:
    """Remove an adapter from a bundle."""
    from edgekv.bundle import open_bundle, remove_lora

    remove_lora(open_bundle(bundle, verify=False), name)
    click.echo(f"{name}: removed")


def _line(adapter: LoraAdapter) -> str:
    record = adapter.record
    held = sum(file.bytes for file in record.files.values())
    clipped = f", {len(record.clipped)} matrices clipped" if record.clipped else ""
    return (
        f"{record.name}: rank {record.rank}, {','.join(record.targets)}, scale {record.scale:g}, "
        f"{held / 1e6:.1f} MB{clipped}"
    )
