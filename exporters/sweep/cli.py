"""`edgekv sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import click

from devices import Device
from edgekv.cli.command import NOTHING, OptionValues, command
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.machine.text_file import read_text_file
from edgekv.option import Argument, Option, OptionGroup, check_place, find_device, parse_numbers
from edgekv.plan.options import DEFAULT_CONTEXT, DEFAULT_KV_DTYPE
from edgekv.spec.geometry import KvDtype
from exporters.cli.common import ready_cluster
from exporters.options import ANY_CHIP, KV_DTYPES, LOCAL, Cluster, ExportOptions, read_recipe
from exporters.progress import progress_bars
from exporters.sweep.options import SweepOptions

if TYPE_CHECKING:
    from edgekv.bundle import RotationName
    from exporters.quantize.recipe import Recipe
    from exporters.sweep.result import SweepReport

PAGE = "sweep.html"
_SWEPT = ("device", "recipe", "context", "kv_dtype", "splits", "graph_format", "compile", "lora")
_GOALS = ("target_mb", "max_kl", "target_tokens_per_s")
_COMMON = tuple(option.name for option in fields(ExportOptions) if option.name not in _SWEPT + _GOALS)
_LOCAL = Cluster(LOCAL)
_DEFAULTS = SweepOptions()


def _listed(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(option, got=repr(text), expected="names, comma-separated", fix="Correct the list.")
    return [*dict.fromkeys(names)]


def _chosen(option: str, text: str, *, known: tuple[str, ...]) -> list[str]:
    names = _listed(option, text)
    if wrong := [name for name in names if name not in known]:
        raise UsageError(option, got=repr(wrong[0]), expected=" or ".join(known), fix=f"Use {option} {known[0]}.")
    return names


def _recipes(option: str, text: str) -> list[tuple[str, Recipe]]:
    recipes = [(name, read_recipe(name)) for name in _listed(option, text)]
    if wrong := [name for name, recipe in recipes if recipe.mean_bits is not None]:
        expected = "recipes that say the type of each matrix"
        fix = f"Export with --recipe {wrong[0]} by itself."
        raise UsageError(option, got=wrong[0], expected=expected, fix=fix)
    return recipes


def _devices(option: str, text: str) -> list[Device]:
    return [find_device(option, name) for name in _listed(option, text)]


def _rotations(option: str, text: str) -> list[str]:
    from edgekv.bundle import RotationName  # slow to import

    return _chosen(option, text, known=get_args(RotationName))


def _contexts(option: str, text: str) -> list[tuple[int, ...]]:
    return [parse_numbers(option, numbers.replace("+", ",")) for numbers in _listed(option, text)]


@dataclass(frozen=True, slots=True)
class Axes:
    """What is combined."""

    recipes: Annotated[
        Sequence[tuple[str, Recipe]],
        Option("Recipes or recipe files, comma-separated.", parse=_recipes, shown="w8a16,w4a16-lpbq64"),
    ] = field(default_factory=lambda: _recipes("--recipes", "w8a16,w4a16-lpbq64"))
    kv: Annotated[
        Sequence[KvDtype],
        Option(
            "Integer types of the KV cache, comma-separated: u8, s16.", parse=partial(_chosen, known=KV_DTYPES["onnx"])
        ),
    ] = (DEFAULT_KV_DTYPE,)
    devices: Annotated[Sequence[Device], Option("Target chips, comma-separated.", parse=_devices, shown=ANY_CHIP)] = (
        field(default_factory=lambda: _devices("--devices", ANY_CHIP))
    )
    contexts: Annotated[
        Sequence[tuple[int, ...]],
        Option(
            "Context lengths, comma-separated; 512+1024 is one bundle with both.",
            parse=_contexts,
            shown=str(DEFAULT_CONTEXT),
        ),
    ] = ((DEFAULT_CONTEXT,),)
    splits: Annotated[
        Sequence[int | None],
        Option("Numbers of parts, comma-separated.", parse=parse_numbers, shown="as export chooses"),
    ] = (None,)
    rotations: Annotated[
        Sequence[RotationName | None],
        Option(
            "Rotations of the residual, comma-separated: none, hadamard, principal.",
            parse=_rotations,
            shown="that of each recipe",
        ),
    ] = (None,)


@command
def sweep(
    checkpoint: Annotated[
        str,
        Argument(
            "A checkpoint folder or GGUF file that all workers see, its fsspec URL, or a hub id.", parse=check_place
        ),
    ],
    text: Annotated[Path, Option("A UTF-8 text file on which quality is measured.")],
    folder: Annotated[Path, Option("Folder for results, page, bundles and pieces.", "-o --output")],
    axes: Annotated[Axes, OptionGroup("Combinations")],
    output: Output,
    common: Annotated[OptionValues[ExportOptions], OptionGroup("Exports", only=_COMMON)] = NOTHING,
    compiles: Annotated[
        bool | None,
        Option("Also write context binaries.", "--compile/--no-compile", shown="yes, without --skip-htp-check"),
    ] = None,
    cluster: Annotated[Cluster, OptionGroup("Run")] = _LOCAL,
    tokens: Annotated[int, Option("Maximum number of tokens to evaluate.", minimum=1)] = 4096,
    options: Annotated[SweepOptions, OptionGroup("Options")] = _DEFAULTS,
) -> None:
    """What combinations share is computed once. An interrupted sweep continues when the same command is run again."""
    from exporters.pipeline.quality import Text
    from exporters.sweep.combination import combinations
    from exporters.sweep.page import write_page
    from exporters.sweep.sweep import run_sweep

    compiles = common.get("check_on_htp", True) if compiles is None else compiles
    if (calibration := common.get("calibration")) is not None:
        common["calibration"] = calibration.absolute()
    template = ExportOptions(**{"device": axes.devices[0], "compile": compiles, **common})
    chosen = combinations(axes.recipes, axes.kv, axes.devices, axes.contexts, axes.splits, axes.rotations)
    content = read_text_file(text, "--text")
    _make_folder(folder)
    with progress_bars(output.is_quiet) as progress:
        report = run_sweep(
            checkpoint,
            [*chosen],
            Text(text.name, content, tokens),
            folder,
            template,
            options,
            ready_cluster(cluster),
            progress,
        )
    write_page(folder / PAGE, report)
    if output.as_json:
        print_json(report)
        return
    _show(report, folder)


def _show(report: SweepReport, output: Path) -> None:
    from exporters.sweep.show import lines

    for line in lines(report):
        click.echo(line)
    click.echo(output / PAGE)


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"-o {output}", got=error.strerror, expected="a folder that can be written", fix="Give another one."
        ) from None
