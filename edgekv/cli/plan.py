"""`edgekv plan`: whether a model fits a device, how fast it can be, and the cost of its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from devices import Device
from edgekv.cli.command import command
from edgekv.cli.output import Output, print_json
from edgekv.option import Argument, Option, OptionGroup, find_device
from edgekv.plan.options import PlanOptions
from edgekv.plan.wording import duration, duration_span, gb, span

if TYPE_CHECKING:
    from edgekv.plan import EncoderPlan, Estimate, ExportCost, Plan, SpeculativeSpeed, Speed

Row = tuple[str, str, str]
_DEFAULTS = PlanOptions()


@command
def plan(
    config: Annotated[Path, Argument("A config.json, a folder that has one, a GGUF file, a hub id, or a bundle.")],
    device: Annotated[Device, Option("Target chip: part number or name, such as SM8650.", parse=find_device)],
    output: Output,
    options: Annotated[PlanOptions, OptionGroup("Options")] = _DEFAULTS,
) -> None:
    """Reads the configuration only, no weights. Speed, RAM and time are estimates; the sources are listed. The defaults
    are those of `edgekv export`.
    """
    from edgekv.plan import make_plan  # slow to import, and --help does not need it

    made = make_plan(config, device, options)
    if output.as_json:
        print_json(made)
    else:
        _show(made)


def _show(made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    console.print(made.summary, end="\n\n")
    for warning in made.warnings:
        console.print(f"Warning: {warning}", end="\n\n", soft_wrap=True)
    ar = ",".join(map(str, made.ar))
    console.print(
        f"{made.source}: {made.parameters / 1e6:,.1f} M parameters, recipe {made.recipe}, cache {made.kv_dtype}, "
        f"AR {ar}"
    )
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    sections = [_memory_rows(made), _export_rows(made.export), _speed_rows(made.speed, made.ar[-1])]
    sections.append(_estimate_rows(made.estimate))
    for section in [*sections, _speculation_rows(made.speculation or ())]:
        for row in section:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    console.print(f"Planned with {made.strategy.reason}", soft_wrap=True)
    console.print("Assumed:")
    for assumption in made.assumptions:
        console.print(f"- {assumption}", soft_wrap=True)


def _memory_rows(made: Plan) -> list[Row]:
    needed, fit, parts = made.demand, made.fit, made.parts or []
    rows = [
        ("weights", gb(needed.weights_bytes or 0), "embedding table, layers and head"),
        ("cache", gb(needed.cache_bytes), made.strategy.strategy),
        ("activations", gb(needed.activations_bytes or 0), f"AR-{made.ar[-1]}, an upper estimate"),
        ("total", gb(needed.used_bytes), f"{gb(needed.limit_bytes)} in one HTP context"),
        ("HTP contexts", str(len(parts)) if parts else "none", ", ".join(gb(part.used_bytes) for part in parts)),
        ("RAM to compile", gb(max((part.compile_peak_bytes for part in parts), default=0)), "largest part"),
        *_encoder_rows(made.encoder),
        ("longest context", _or_none(fit.largest_context), "that fits, at most the model's own"),
    ]
    if fit.largest_in_one != fit.largest_context:
        rows.append(("", _or_none(fit.largest_in_one), "undivided, in one HTP context"))
    return rows


def _encoder_rows(encoder: EncoderPlan | None) -> list[Row]:
    if encoder is None:
        return []
    shares = f"weights {gb(encoder.weights_bytes)}, activations {gb(encoder.activations_bytes)}"
    return [("vision encoder", gb(encoder.used_bytes), f"{shares}; {gb(encoder.compile_peak_bytes)} to compile")]


def _export_rows(export: ExportCost) -> list[Row]:
    phases = {
        "quantize": export.quantization_peak_bytes,
        "write": export.writing_peak_bytes,
        **({"HTP check": export.check_peak_bytes} if export.check_peak_bytes else {}),
    }
    check = f"of which {duration(export.check_seconds)} for the HTP check" if export.check_seconds else "no HTP check"
    listed = ", ".join(f"{name} {gb(peak_bytes)}" for name, peak_bytes in phases.items())
    return [
        ("graph", gb(export.graph_bytes), f"each of {export.graphs}, without weights; compressed on disk"),
        ("bundle", gb(export.bundle_bytes), "on disk"),
        ("RAM to export", gb(export.peak_bytes), listed),
        ("time to export", duration(export.seconds), check),
    ]


def _speed_rows(speed: Speed, ar: int) -> list[Row]:
    reached = span(*speed.reached_gb_per_s)
    rows = [
        (
            "read per token",
            gb(speed.weights_bytes + speed.full_cache_bytes),
            f"weights {gb(speed.weights_bytes)}, cache {gb(speed.full_cache_bytes)}",
        ),
        ("tokens a second", span(*speed.tokens_per_s), f"expected: {_basis(speed, reached)}"),
        (
            "",
            f"{speed.static_roofline_tokens_per_s:.1f}",
            f"upper bound: {speed.dram_gb_per_s:g} GB/s, the peak of the DRAM",
        ),
        ("", f"{speed.roofline_tokens_per_s:.1f}", "upper bound with graphs of several contexts"),
    ]
    for i, first in enumerate(speed.first_token):
        passes = f"{first.passes} {'pass' if first.passes == 1 else 'passes'} of AR-{ar}"
        rows.append(
            (
                "" if i else "first token",
                duration_span(first.low_s, first.high_s),
                f"expected: prompt of {first.prompt_tokens:,}, {passes}",
            )
        )
    return [*rows, *_published_rows(speed)]


def _basis(speed: Speed, reached: str) -> str:
    if speed.evidence == "published":
        return f"published decoders read {reached} GB/s"
    return f"decoders read {reached} GB/s; {speed.evidence}"


def _published_rows(speed: Speed) -> list[Row]:
    """The published model that is nearest in size, a row for each runtime."""
    rows = list[Row]()
    for at, row in enumerate(speed.published):
        prefill = "" if row.prefill_tokens_per_s is None else f", prefill {row.prefill_tokens_per_s:,.0f}"
        where = f"{row.model} {row.precision}, {row.runtime} on {row.device} ({row.soc})"
        label = "" if at else "nearest model"
        rows.append((label, f"{row.decode_tokens_per_s:.1f}", f"published: {where}, context {row.context:,}{prefill}"))
    return rows


def _estimate_rows(estimate: Estimate | None) -> list[Row]:
    rows = list[Row]()
    for graph in () if estimate is None else estimate.graphs:
        speed = "void" if graph.tokens_per_s is None else f"{graph.tokens_per_s:,.1f}"
        detail = f"{graph.role} AR-{graph.ar}: tokens a second on {graph.proxy}, bound by {graph.bound}"
        rows.append(("" if rows else "simulated", speed, detail))
    return rows


def _speculation_rows(speeds: Sequence[SpeculativeSpeed]) -> list[Row]:
    """A row for each size of verify graphs."""
    return [
        (
            "" if at else "with drafts",
            span(*speed.tokens_per_s),
            f"tokens a second with --draft-rows {speed.rows}: {speed.tokens_per_pass:.2f} tokens a pass, which costs "
            f"{_factors(speed.cost)} steps; {_factors(speed.gain)} times as fast",
        )
        for at, speed in enumerate(speeds)
    ]


def _factors(pair: tuple[float, float]) -> str:
    first, last = (f"{factor:.2f}" for factor in pair)
    return first if first == last else f"{first} to {last}"


def _or_none(number: int | None) -> str:
    return "none" if number is None else f"{number:,}"
