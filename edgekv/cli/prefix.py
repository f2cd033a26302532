"""`edgekv prefix`: bake prefixes into a bundle; list and remove prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from edgekv.cli.command import Group
from edgekv.cli.model import BundleArgument, interactive
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.machine.text_file import read_text_file
from edgekv.option import Argument, Option
from edgekv.runtime.load_options import EngineOptions

prefix = Group("prefix")

PlaceArgument = Annotated[Path, Argument("A bundle, or the folder of --prefix-cache.")]


@prefix.command()
def bake(
    bundle: BundleArgument,
    text: Annotated[Path, Argument("A UTF-8 text file with the start of prompts.")],
    engine: EngineOptions,
    output: Output,
    name: Annotated[str | None, Option("Name of the prefix.", shown="the file's")] = None,
) -> None:
    """Compute a prefix and write it into a bundle.

    Prompts that start with the text resume after it, without any option. Engines and modes differ in the last bits,
    so each has its own prefixes.
    """
    content = read_text_file(text, "TEXT")
    from edgekv.loading import bake_prefix

    baked = bake_prefix(bundle, content, text.stem if name is None else name, interactive(engine))
    if output.as_json:
        print_json(baked)
    else:
        click.echo(f"{bundle}: {baked.name}, {baked.tokens} tokens, {baked.engine}")


@prefix.command("ls")
def list_(place: PlaceArgument, output: Output) -> None:
    """List prefixes."""
    if _is_bundle(place):
        from edgekv.prefix import baked_prefixes

        baked = baked_prefixes(place)
        _print(
            baked,
            [f"{prefix_record.name}: {prefix_record.tokens} tokens, {prefix_record.engine}" for prefix_record in baked],
            output,
        )
        return
    from edgekv.prefix import stored_prefixes

    stored = stored_prefixes(place)
    lines = [
        f"{sequence.id}: {sequence.tokens} tokens, {sequence.bytes:,} bytes, {sequence.own_bytes:,} of them its own, "
        f"priority {sequence.priority}, store {sequence.store}"
        for sequence in stored
    ]
    _print(stored, lines, output)


@prefix.command()
def rm(
    place: PlaceArgument,
    output: Output,
    prefix: Annotated[str | None, Argument("Name or id of the prefix.")] = None,
    engine: Annotated[str | None, Option("In a bundle: only prefixes of this engine.")] = None,
    everything: Annotated[bool, Option("Remove all prefixes.", "--all")] = False,
) -> None:
    """Remove prefixes."""
    if (prefix is None) != everything:
        got = "both" if everything else "neither"
        raise UsageError("PREFIX, --all", got=got, expected="one of them", fix="See edgekv prefix ls.")
    if _is_bundle(place):
        from edgekv.prefix import remove_baked

        baked = remove_baked(place, prefix, engine)
        _print(baked, [f"removed {prefix_record.name}, {prefix_record.engine}" for prefix_record in baked], output)
        return
    from edgekv.prefix import remove_stored

    stored = remove_stored(place, prefix)
    _print(stored, [f"removed {sequence.id}, {sequence.tokens} tokens" for sequence in stored], output)


def _is_bundle(place: Path) -> bool:
    from edgekv.bundle import MANIFEST

    return (place / MANIFEST).is_file()


def _print(entries: object, lines: list[str], output: Output) -> None:
    if output.as_json:
        print_json(entries, list_name="prefixes")
        return
    for line in lines:
        click.echo(line)
