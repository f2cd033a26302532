"""`edgekv conformance`: make a kit, run it on a device, show its report.

Running a kit on the device itself and showing a report need the base install and onnxruntime-qnn alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from edgekv.cli.command import Group
from edgekv.cli.commands import check_extra
from edgekv.cli.output import Output, print_json
from edgekv.machine.system import format_bytes
from edgekv.option import Argument, Option, OptionGroup
from exporters.cli.common import DeviceOption, ForceOption, OutputFolder
from exporters.progress import Progress, progress_bars
from exporters.targets.android.cli import PhoneOptions

if TYPE_CHECKING:
    from edgekv.conformance.run import Runner

conformance = Group("conformance")

KitArgument = Annotated[Path, Argument("A folder of `edgekv conformance make`.")]
PartsOption = Annotated[
    Sequence[str],
    Option("A part or a group of parts, such as family/llama or family; may be repeated.", "--parts", shown="all"),
]


@conformance.command()
def make(
    output: OutputFolder,
    device: DeviceOption,
    printed: Annotated[Output, OptionGroup("Output")],
    bundle: Annotated[
        Path | None, Option("A bundle of yours, compiled for the chip, to decode and measure too.", metavar="BUNDLE")
    ] = None,
    checkpoint: Annotated[
        Path | None, Option("The model to decode golden tokens with.", shown="the embedded one")
    ] = None,
    parts: PartsOption = (),
    force: ForceOption = False,
) -> None:
    """Compile small graphs of every operation and architecture for a chip, with inputs and the integers that the
    emulator computes, and the embedded model. Run this in a clone of the repository.
    """
    check_extra("conformance make", "edgekv", "export")
    from exporters.conformance.make import make_kit

    with progress_bars(printed.is_quiet) as progress:
        kit = make_kit(output, device, parts=parts, bundle=bundle, model=checkpoint, force=force, progress=progress)
    manifest = kit.manifest
    if printed.as_json:
        print_json({"kit": str(output), "bytes": manifest.bytes, "manifest": manifest})
        return
    graphs = sum(1 + len(part.layers) for part in manifest.parts)
    click.echo(f"{output}: {manifest.soc}, V{manifest.arch}, compiled by {manifest.compiler} (QAIRT {manifest.qairt})")
    models = ", ".join(model.name for model in manifest.models) or "none"
    for part, reason in manifest.left_out.items():
        click.echo(f"  without {part}: {reason}")
    click.echo(f"  {len(manifest.parts)} parts, {graphs} graphs, models: {models}; {format_bytes(manifest.bytes)}")


@conformance.command()
def run(
    kit: KitArgument,
    phone: Annotated[PhoneOptions, OptionGroup("Phone")],
    printed: Annotated[Output, OptionGroup("Output")],
    output: Annotated[Path, Option("The file of the report.", "-o --output")] = Path("report.json"),
    parts: PartsOption = (),
    minutes: Annotated[
        float, Option("Minutes of decoding at the end, to watch temperature and clock.", minimum=0)
    ] = 10.0,
    allowed_steps: Annotated[
        int, Option("Largest accepted difference of a 16-bit result, in quantization steps.", minimum=0)
    ] = 4,
    on: Annotated[Literal["here", "adb"], Option("Where to run: this machine, or an Android phone.")] = "here",
) -> None:
    """Run the graphs on the NPU of this device (on x86, its emulator) or of a phone, compare, decode golden tokens with
    each update strategy, and measure speed. An interrupted run resumes; a part that ends its process twice is
    skipped and named.
    """
    from edgekv.conformance.kit import open_kit
    from edgekv.conformance.run import RunChoice, run_kit
    from edgekv.conformance.show import lines_of

    choice, opened = RunChoice(tuple(parts), allowed_steps, minutes), open_kit(kit)
    with progress_bars(printed.is_quiet) as progress:
        report = run_kit(opened, _runner(on, phone, progress), output, choice, progress)
    if printed.as_json:
        print_json(report)
        return
    for line in lines_of(report):
        click.echo(line)
    printed.note(f"[{output}: send this file]")


def _runner(on: Literal["here", "adb"], phone: PhoneOptions, progress: Progress) -> Runner:
    if on == "here":
        from edgekv.conformance.run import LocalRunner

        return LocalRunner()
    check_extra("conformance run --on adb", "edgekv", "export")
    from exporters.conformance.phone import PhoneRunner
    from exporters.targets.android.adb import Adb

    return PhoneRunner(Adb.connect(phone.serial), phone.to, phone.qairt, phone.chip, progress)


@conformance.command()
def show(
    report: Annotated[Path, Argument("A report.json of `edgekv conformance run`.")],
    printed: Annotated[Output, OptionGroup("Output")],
    html: Annotated[Path | None, Option("Write a page (.html).", group="Reports")] = None,
) -> None:
    """What ran, where it differs, and how fast it is beside what was expected."""
    from edgekv.conformance.show import lines_of, open_report

    opened = open_report(report)
    if html is not None:
        check_extra("--html", "edgekv", "export")
        from exporters.conformance.page import write_page

        write_page(html, opened)
    if printed.as_json:
        print_json(opened)
        return
    for line in lines_of(opened):
        click.echo(line)
    if html is not None:
        click.echo(html)
