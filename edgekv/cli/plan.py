"""`edgekv plan`: will it fit, how fast, and what does the export take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from devices import find
from edgekv.cli.numbers import parse_numbers
from edgekv.plan import ExportCost, Plan, make_plan
from edgekv.plan.verdict import duration, gb


def plan(
    config: Annotated[Path, typer.Argument(help="A config.json, or a folder that has one.", show_default=False)],
    device: Annotated[str, typer.Option(help="Target: part number or name, such as SM8650.", show_default=False)],
    context: Annotated[
        int | None, typer.Option(help="Context length in tokens.", show_default="the model's longest")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Integer types, such as w8a16 or w4a16-lpbq64.")] = "w8a16",
    kv: Annotated[str, typer.Option(help="Integer type of the KV cache: u8, or s16 from V73 on.")] = "u8",
    ar: Annotated[
        str | None,
        typer.Option(help="Tokens per inference of each graph, with commas; 1 is among them.", show_default="1,32"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Before hours of export: whether a model fits a device, how fast it can be, and what the export takes.

    Nothing but config.json is read. RAM and time of the export are estimates.
    """
    graphs = None if ar is None else parse_numbers("--ar", ar)
    made = make_plan(config, device=find(device), context=context, recipe=recipe, kv=kv, ar=graphs)
    if as_json:
        typer.echo(msgspec.json.encode(made))
    else:
        _show(made)


def _show(made: Plan) -> None:
    console = Console(markup=False, highlight=False)
    console.print(made.verdict.text, end="\n\n")
    ar = ",".join(map(str, made.ar))
    console.print(
        f"{made.source}: {made.parameters / 1e6:,.1f} M weights, recipe {made.recipe}, cache {made.kv_dtype}, AR {ar}"
    )
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(made):
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console.print(table)
    console.print(f"Planned with {made.strategy.reason}", soft_wrap=True)
    console.print("Assumed:")
    for each in made.assumptions:
        console.print(f"- {each}", soft_wrap=True)


def _rows(made: Plan) -> list[tuple[str, str, str] | None]:
    demand, export, speed = made.demand, made.export, made.roofline
    parts = made.parts or []
    return [
        ("weights", gb(demand.weights_bytes), "embedding table, layers and head"),
        ("cache", gb(demand.cache_bytes), made.strategy.strategy),
        ("activations", gb(demand.activations_bytes), f"one layer of AR-{made.ar[-1]}, an estimate from above"),
        ("together", gb(demand.used_bytes), f"of {gb(demand.context_bytes)} in one HTP context"),
        ("HTP contexts", str(len(parts)) if parts else "none", ", ".join(gb(part.used_bytes) for part in parts)),
        ("RAM to compile", gb(max((part.compile_peak_bytes for part in parts), default=0)), "the most, for one part"),
        ("largest context", _or_none(made.verdict.largest_context), "that fits one, and that the model was made for"),
        None,
        ("graph", gb(export.graph_bytes), f"each of {export.graphs}, without weights"),
        ("bundle", gb(export.bundle_bytes), "on disk"),
        ("RAM to export", gb(export.peak_bytes), _phases(export)),
        ("time to export", duration(export.seconds), f"of it {duration(export.check_seconds)} in the HTP check"),
        None,
        (
            "read per token",
            gb(speed.weights_bytes + speed.mean_cache_bytes),
            f"weights {gb(speed.weights_bytes)}, cache {gb(speed.mean_cache_bytes)} at the mean context",
        ),
        ("tokens a second", f"{speed.tokens_per_s:.1f}", f"at most, by {speed.dram_gb_per_s:g} GB/s of DRAM"),
        ("", f"{speed.static_tokens_per_s:.1f}", "with one static graph, which reads the whole window always"),
    ]


def _phases(export: ExportCost) -> str:
    phases = {
        "quantize": export.quantization_peak_bytes,
        "write": export.writing_peak_bytes,
        "check on HTP": export.check_peak_bytes,
    }
    return ", ".join(f"{name} {gb(peak_bytes)}" for name, peak_bytes in phases.items())


def _or_none(number: int | None) -> str:
    return "none" if number is None else f"{number:,}"
