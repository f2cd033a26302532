"""`edgekv prefix`: bake prefixes into a bundle; list and remove prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgekv.cli.engine_options import TalkingModeOption, talking_mode
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.text_file import read_text_file

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Bake, list and remove cached prefixes.")

PlaceArgument = Annotated[Path, typer.Argument(help="A bundle, or the folder of --prefix-cache.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def bake(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)],
    text: Annotated[Path, typer.Argument(help="A UTF-8 text file with the start of prompts.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name of the prefix.", show_default="the file's")] = None,
    engine: Annotated[str, typer.Option(help="Engine that computes and uses the prefix: cpu or htp.")] = "cpu",
    cpu_mode: TalkingModeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a prefix and write it into a bundle.

    Prompts that start with the text resume after it, without any option. Engines and modes differ in the last bits,
    so each has its own prefixes.
    """
    content = read_text_file(text, "TEXT")
    from edgekv.bake import bake_prefix

    mode = talking_mode(engine, cpu_mode)
    baked = bake_prefix(bundle, content, text.stem if name is None else name, engine, mode)
    if as_json:
        print_json(baked)
    else:
        typer.echo(f"{bundle}: {baked.name}, {baked.tokens} tokens, {baked.engine}")


@app.command("ls")
def list_(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """List prefixes."""
    if _is_bundle(place):
        from edgekv.prefix import baked_prefixes

        baked = baked_prefixes(place)
        _print(baked, [f"{each.name}: {each.tokens} tokens, {each.engine}" for each in baked], as_json)
        return
    from edgekv.prefix import stored_prefixes

    stored = stored_prefixes(place)
    lines = [
        f"{each.id}: {each.tokens} tokens, {each.bytes:,} bytes, {each.own_bytes:,} of them its own, "
        f"priority {each.priority}, store {each.store}"
        for each in stored
    ]
    _print(stored, lines, as_json)


@app.command()
def rm(
    place: PlaceArgument,
    prefix: Annotated[str | None, typer.Argument(help="Name or id of the prefix.", show_default=False)] = None,
    engine: Annotated[
        str | None, typer.Option(help="In a bundle: only prefixes of this engine.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all prefixes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove prefixes."""
    if (prefix is None) != everything:
        found = "both" if everything else "neither"
        raise UsageError("PREFIX, --all", got=found, expected="one of them", fix="See edgekv prefix ls.")
    if _is_bundle(place):
        from edgekv.prefix import remove_baked

        baked = remove_baked(place, prefix, engine)
        _print(baked, [f"removed {each.name}, {each.engine}" for each in baked], as_json)
        return
    from edgekv.prefix import remove_stored

    stored = remove_stored(place, prefix)
    _print(stored, [f"removed {each.id}, {each.tokens} tokens" for each in stored], as_json)


def _is_bundle(place: Path) -> bool:
    from edgekv.bundle import MANIFEST

    return (place / MANIFEST).is_file()


def _print(entries: object, lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(entries, list_name="prefixes")
        return
    for line in lines:
        typer.echo(line)
