"""`edgekv compile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from devices import find
from edgekv.bundle import CompiledManifest, open_bundle
from edgekv.cli.output import print_json
from edgekv.runtime import HtpOptions
from exporters.cli.next_step import next_line
from exporters.cli.options import CacheOption, DeviceOption, ForceOption, JsonOption
from exporters.cli.scheduler import SchedulerOption, StoreOption, find_cluster
from exporters.compile import compile_bundle
from exporters.options import RunOptions
from exporters.progress import one_step, shown

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)


def compile_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    device: DeviceOption,
    each: Annotated[
        Optional[bool],
        typer.Option(
            "--each/--no-each",
            help="Also write one binary per graph; the x86 emulator can load only these.",
            show_default="yes, unless the graphs are split into parts",
        ),
    ] = None,
    htp: Annotated[
        Optional[str],
        typer.Option(help="Options of the compiler: vtcm=MIB,optimization=1 to 3.", show_default="the chip's, 2"),
    ] = None,
    cache_dir: CacheOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted compilation.")] = False,
    scheduler: SchedulerOption = None,
    store: StoreOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compile a bundle to context binaries for a chip.

    The binaries are stored in the bundle, one per part with the weights shared by all graphs. The target chip is read
    back from each binary.
    """
    target, options = find(device), HtpOptions.parse(htp or "")
    with shown() as progress:
        with one_step("verify bundle", progress):
            opened = open_bundle(bundle)
        peaks: dict[str, int] = {}
        compiled = compile_bundle(
            opened,
            target,
            RunOptions(cache_dir=cache_dir, store=store, resume=resume, cluster=find_cluster(scheduler)),
            each=each,
            force=force,
            progress=progress,
            watch=peaks.__setitem__,
            options=options,
        )
    if as_json:
        print_json(msgspec.to_builtins(compiled) | {"peak_bytes": peaks})
        return
    show_compiled(bundle / "compiled" / compiled.soc, compiled, peaks)
    typer.echo(next_line(bundle, opened.manifest, is_compiled=True))


def show_compiled(folder: Path, compiled: CompiledManifest, peaks: Mapping[str, int]) -> None:
    """Print the binaries that were written, their size, and the peak RAM of the compiler for each."""
    vtcm = compiled.vtcm_bytes >> 20
    typer.echo(f"{folder}: {compiled.soc}, V{compiled.arch}, {vtcm} MiB VTCM")
    for binary in compiled.binaries:
        size = compiled.files[binary.file].bytes / 1e6
        held = "weights shared by " if binary.graphs > 1 else ""
        peak = f"; compiled in {peaks[binary.file] / 1e9:.2f} GB of RAM" if binary.file in peaks else ""
        typer.echo(f"  {binary.file}: {size:.2f} MB, {held}{', '.join(binary.wrappers)}{peak}")
