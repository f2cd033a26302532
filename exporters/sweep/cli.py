"""`edgekv sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional, cast

import typer

from edgekv.bundle import RotationName
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.kv import KvDtype
from edgekv.option import find_device, parse_numbers
from edgekv.system import parse_bytes
from edgekv.text_file import read_text_file
from exporters.cli.options import JsonOption
from exporters.cli.scheduler import DivideOption
from exporters.options import KV_DTYPES, Cluster
from exporters.progress import shown
from exporters.quantize.recipe import find_recipe
from exporters.sweep.combination import Common, combinations
from exporters.sweep.page import write_page
from exporters.sweep.result import SweepReport
from exporters.sweep.show import lines
from exporters.sweep.sweep import Text, run_sweep

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

PAGE = "sweep.html"
_ROTATIONS = ("none", "hadamard")


def sweep(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder or GGUF file that all workers see, its fsspec URL, or a hub id.")
    ],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file on which quality is measured.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for results, page, bundles and pieces.")],
    recipes: Annotated[str, typer.Option(help="Recipes or recipe files, comma-separated.")] = "w8a16,w4a16-lpbq64",
    kv: Annotated[str, typer.Option(help="Integer types of the KV cache: u8, s16.")] = "u8",
    devices: Annotated[str, typer.Option(help="Target chips, comma-separated.")] = "SM8650",
    contexts: Annotated[
        str, typer.Option(help="Context lengths, comma-separated; 512+1024 is one bundle with both.")
    ] = "512",
    splits: Annotated[
        Optional[str], typer.Option(help="Numbers of parts, comma-separated.", show_default="as export chooses")
    ] = None,
    rotations: Annotated[
        Optional[str],
        typer.Option(help="Rotations of the residual: none, hadamard.", show_default="that of each recipe"),
    ] = None,
    ar: Annotated[str, typer.Option("--ar", help="Tokens per inference of each graph, comma-separated.")] = "1,32",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to evaluate.")] = 4096,
    calibration: Annotated[Optional[Path], typer.Option(help="UTF-8 calibration text that all workers see.")] = None,
    calibration_tokens: Annotated[
        Optional[int], typer.Option(help="Calibration tokens to use at most.", show_default="as export")
    ] = None,
    compile_too: Annotated[bool, typer.Option("--compile/--no-compile", help="Also write context binaries.")] = True,
    skip_htp_check: Annotated[
        bool, typer.Option("--skip-htp-check", help="Neither check nor compile with the HTP compiler.")
    ] = False,
    budget: Annotated[
        Optional[str], typer.Option(help="Size limit of the recommended bundle, such as 600MB.", show_default="none")
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="local for processes on this machine, or a Dask scheduler: tcp://HOST:PORT.")
    ] = "local",
    workers: Annotated[
        Optional[int], typer.Option(min=1, help="Local processes.", show_default="one per core, as far as RAM allows")
    ] = None,
    store: Annotated[
        Optional[str],
        typer.Option(
            help="Folder or fsspec URL of the pieces, which all workers reach, such as s3://bucket/sweeps.",
            show_default="OUTPUT/pieces",
        ),
    ] = None,
    divide_layers: DivideOption = False,
    prune_days: Annotated[
        Optional[float],
        typer.Option(
            "--prune", min=0, help="Afterwards remove pieces that no sweep of this folder has used for so many days."
        ),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Leave out combinations that cannot be or fail, and unfit workers.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export, compile and evaluate every combination of recipe, cache, chip and context, and compare them.

    What combinations share is computed once. An interrupted sweep continues when the same command is run again.
    """
    common = Common(
        ar=parse_numbers("--ar", ar),
        calibration=None if calibration is None else calibration.absolute(),
        calibration_tokens=calibration_tokens,
        check_on_htp=not skip_htp_check,
        compile=compile_too and not skip_htp_check,
    )
    wanted = combinations(
        [(name, find_recipe(name)) for name in _listed("--recipes", recipes)],
        [cast(KvDtype, each) for each in _chosen("--kv", kv, KV_DTYPES["onnx"])],
        [find_device("--devices", name) for name in _listed("--devices", devices)],
        [parse_numbers("--contexts", each.replace("+", ",")) for each in _listed("--contexts", contexts)],
        (None,) if splits is None else parse_numbers("--splits", splits),
        (None,)
        if rotations is None
        else [cast(RotationName, each) for each in _chosen("--rotations", rotations, _ROTATIONS)],
    )
    content = read_text_file(text, "--text")
    budget_bytes = None if budget is None else parse_bytes("--budget", budget)
    _make_folder(output)
    with shown() as progress:
        report = run_sweep(
            checkpoint,
            [*wanted],
            Text(text.name, content, tokens),
            output,
            Cluster(scheduler, workers, keep_going, _say, divide_layers),
            common,
            store_place=store,
            progress=progress,
            budget_bytes=budget_bytes,
            prune_days=prune_days,
        )
    write_page(output / PAGE, report)
    if as_json:
        print_json(report)
        return
    _show(report, output)


def _show(report: SweepReport, output: Path) -> None:
    for line in lines(report):
        typer.echo(line)
    typer.echo(output / PAGE)


def _say(line: str) -> None:
    typer.echo(f"edgekv: {line}", err=True)


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"-o {output}", got=error.strerror, expected="a folder that can be written", fix="Give another one."
        ) from None


def _listed(option: str, text: str) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    if not all(names):
        raise UsageError(option, got=repr(text), expected="names, comma-separated", fix="Correct the list.")
    return [*dict.fromkeys(names)]


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = _listed(option, text)
    if wrong := [name for name in names if name not in known]:
        raise UsageError(option, got=repr(wrong[0]), expected=" or ".join(known), fix=f"Use {option} {known[0]}.")
    return names
