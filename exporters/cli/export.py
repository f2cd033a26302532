"""`edgekv export`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import click

from edgekv.cli.command import COMMON_CHIPS, OptionValues, command
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.option import Argument, Option, OptionGroup, check_place
from exporters.checkpoint.lora.choice import AdapterChoice
from exporters.cli.common import EstimateOption, ForceOption, ready_to_run
from exporters.cli.compile import show_compiled
from exporters.cli.estimate import show_estimate
from exporters.cli.next_step import next_line
from exporters.cli.pieces import resumable
from exporters.options import ExportOptions, RunOptions
from exporters.progress import progress_bars

_RUN = ("max_ram_bytes", "cache_dir", "store", "resume", "keep_pieces", "cluster.scheduler")


@command
def export(
    checkpoint: Annotated[
        str,
        Argument(
            "A Hugging Face checkpoint folder, a GGUF file, a hub id such as org/model, or their URL.",
            parse=check_place,
        ),
    ],
    target: Annotated[Path, Option("The bundle's folder; must not exist yet.", "-o --output", group="Target")],
    chosen: Annotated[OptionValues[ExportOptions], OptionGroup("Target")],
    run: Annotated[RunOptions, OptionGroup("Run", only=_RUN)],
    output: Output,
    lora: Annotated[
        Sequence[AdapterChoice],
        Option(
            "A LoRA adapter (peft) to merge into the weights; repeat for several.",
            metavar="DIR[=SCALE]",
            parse=AdapterChoice.parse,
            collect=tuple,
        ),
    ] = (),
    draft_for: Annotated[
        Path | None,
        Option(
            "Export this checkpoint, or its MTP head, as a drafter for a bundle that was exported with --give-hidden.",
            metavar="BUNDLE",
            group="Target",
        ),
    ] = None,
    task: Annotated[
        Literal["rerank"] | None,
        Option(
            "rerank: score documents by the logits of yes and no in Qwen3-Reranker's prompt. Folders with modules.json "
            "need no option.",
            shown="what the folder says",
        ),
    ] = None,
    force: ForceOption = False,
    estimate: EstimateOption = False,
) -> None:
    """With --device, the HTP compiler compiles every graph, and nodes that would compute in float are refused."""
    import msgspec

    from edgekv.bundle import check_new, open_bundle, open_compiled
    from edgekv.plan import mask_warnings
    from edgekv.qnn import provider as qnn
    from exporters.cli.exported import export_lines, export_warnings
    from exporters.estimate import check_estimate, estimate_bundle
    from exporters.export import export_bundle
    from exporters.pipeline.place import open_checkpoint
    from exporters.plan import export_geometry
    from exporters.preconditions import check_first
    from exporters.quantize.calibrate import read_calibration
    from exporters.quantize.scripts import script_warnings

    check_new(target, force=force)
    if draft_for is not None:
        if estimate:
            raise UsageError("--estimate", got="it with --draft-for", expected="edgekv estimate", fix="Leave it out.")
        if task is not None:
            expected = "a drafter, which writes text"
            raise UsageError("--task", got=f"{task} with --draft-for", expected=expected, fix="Leave one of them out.")
        _export_drafter(checkpoint, draft_for, target, chosen, run, output, lora=lora, force=force)
        return
    if "device" not in chosen:
        chosen = _for_cpu(chosen, estimate=estimate)
    options = ExportOptions(**chosen)
    run = ready_to_run(run)
    check_first(checkpoint, options)
    with progress_bars(output.is_quiet) as bars, resumable(bars) as progress:
        opened = open_checkpoint(checkpoint, lora, ranks=task is not None)
        limited = msgspec.structs.replace(opened.spec, limits=tuple(options.max_attention_window))
        geometry = export_geometry(limited, options)
        calibration = read_calibration(options.calibration, opened.folder)
        warnings = () if limited.bidirectional else mask_warnings(geometry, options.ar, options.device)
        for warning in chain(warnings, script_warnings(calibration, opened.tokenizer)):
            click.echo(f"edgekv: warning: {warning}", err=True)
        peaks: dict[str, int] = {}
        watch = peaks.__setitem__
        if estimate:
            check_estimate(options.device, options.graph_format)
        manifest = export_bundle(opened, target, options, run, force=force, progress=progress, watch=watch)
        estimated = None
        if estimate:
            estimated = estimate_bundle(open_bundle(target, verify=False), options.device, run, progress=progress)
    for warning in export_warnings(manifest):
        click.echo(f"edgekv: warning: {warning}", err=True)
    if output.as_json:
        print_json(manifest if estimated is None else msgspec.to_builtins(manifest) | {"estimate": estimated})
        return
    for line in export_lines(target, manifest, opened):
        click.echo(line)
    if "device" not in chosen:
        click.echo("  for the CPU; edgekv compile --device DEVICE checks and compiles it for a chip")
    if options.compile:
        compiled = open_compiled(open_bundle(target, verify=False), manifest.device, qnn.compiler())
        assert compiled is not None, "written just now"
        show_compiled(compiled.path, compiled.manifest, peaks)
    if estimated is not None:
        show_estimate(estimated)
    click.echo(next_line(target, manifest, is_compiled=options.compile, for_cpu="device" not in chosen))


def _for_cpu(options: OptionValues[ExportOptions], *, estimate: bool) -> OptionValues[ExportOptions]:
    """The options of an export without a chip.

    Raises:
        UsageError: one of them needs a chip.
    """
    needing = {"--compile": options.get("compile"), "--estimate": estimate, "--allow-float": options.get("allow_float")}
    needing["--target-tokens-per-s"] = options.get("target_tokens_per_s")
    if option := next((name for name, value in needing.items() if value), None):
        raise UsageError("--device", got=f"none with {option}", expected=COMMON_CHIPS, fix="Add --device.")
    return OptionValues({**options, "check_on_htp": False})


def _export_drafter(
    checkpoint: str,
    draft_for: Path,
    folder: Path,
    options: OptionValues[ExportOptions],
    run: RunOptions,
    output: Output,
    *,
    lora: Sequence[AdapterChoice],
    force: bool,
) -> None:
    from edgekv.bundle import open_bundle
    from exporters.cli.exported import drafter_lines
    from exporters.drafter import Drafter, check_given
    from exporters.export import export_drafter

    if lora:
        raise UsageError("lora", got="it with --draft-for", expected="what the target has", fix="Leave it out.")
    check_given(options)
    run = ready_to_run(run)
    with progress_bars(output.is_quiet) as bars, resumable(bars) as progress:
        drafter = Drafter.open(checkpoint, open_bundle(draft_for))
        manifest = export_drafter(drafter, folder, ExportOptions(**options), run, force=force, progress=progress)
    if output.as_json:
        print_json(manifest)
        return
    for line in drafter_lines(folder, manifest, drafter):
        click.echo(line)
