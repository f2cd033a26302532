"""`edgekv lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edgekv.bundle import LoraAdapter, LoraRecord, lora_adapters, open_bundle, remove_lora
from edgekv.cli.output import print_json
from exporters.checkpoint.lora import AdapterChoice
from exporters.cli.options import ForceOption, JsonOption
from exporters.lora.add import add_lora

lora = typer.Typer(help="LoRA adapters of a bundle with slots, which requests choose by name.", no_args_is_help=True)

BundleArgument = Annotated[Path, typer.Argument(help="A bundle exported with --lora-slots.")]
_SHOWN = 5


class LoraList(msgspec.Struct, frozen=True):
    """What `edgekv lora ls --json` prints."""

    adapters: list[LoraRecord]


@lora.command()
def add(
    bundle: BundleArgument,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A LoRA adapter as peft saves it.")],
    name: Annotated[str, typer.Option(help="Name for requests: letters, digits, ., _ and -.")],
    scale: Annotated[float, typer.Option(help="Multiplies what the adapter adds.")] = 1.0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize an adapter and add it to a bundle. Graphs and compiled binaries stay as they are."""
    choice = AdapterChoice.parse("--scale", f"{adapter}={scale!r}" if adapter.is_dir() else str(adapter))
    added = add_lora(open_bundle(bundle), choice, name, force=force)
    if as_json:
        print_json(added.record)
        return
    typer.echo(_line(added))
    for each in added.record.clipped[:_SHOWN]:
        typer.echo(
            f"  layer {each.layer}, {each.target}: {each.elements:,} elements clipped ({each.share:.2%}), "
            f"the largest {each.reach:.2f} times the range"
        )
    if (more := len(added.record.clipped) - _SHOWN) > 0:
        typer.echo(f"  and {more} more matrices; export with a larger --lora-reach")


@lora.command("ls")
def list_(bundle: BundleArgument, as_json: JsonOption = False) -> None:
    """List the adapters of a bundle."""
    found = lora_adapters(open_bundle(bundle, verify=False))
    if as_json:
        print_json(LoraList([each.record for each in found]))
        return
    for each in found:
        typer.echo(_line(each))
    if not found:
        typer.echo("no adapters")


@lora.command()
def rm(bundle: BundleArgument, name: Annotated[str, typer.Argument(help="Name of the adapter.")]) -> None:
    """Remove an adapter from a bundle."""
    remove_lora(open_bundle(bundle, verify=False), name)
    typer.echo(f"{name}: removed")


def _line(adapter: LoraAdapter) -> str:
    record = adapter.record
    held = sum(each.bytes for each in record.files.values())
    clipped = f", {len(record.clipped)} matrices clipped" if record.clipped else ""
    return (
        f"{record.name}: rank {record.rank}, {','.join(record.targets)}, scale {record.scale:g}, "
        f"{held / 1e6:.1f} MB{clipped}"
    )
