"""`edgekv export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional, TypeVar, cast

import typer

from devices import find
from edgekv import qnn
from edgekv.bundle import GraphFormat, open_bundle, open_compiled
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.kv import KeyLayout, KvDtype
from edgekv.option import parse_numbers
from edgekv.plan import mask_warnings
from edgekv.system import parse_bytes
from exporters.checkpoint.lora import AdapterChoice
from exporters.cli.compile import show_compiled
from exporters.cli.exported import export_lines
from exporters.cli.next_step import next_line
from exporters.cli.options import CacheOption, DeviceOption, ForceOption, JsonOption
from exporters.cli.scheduler import DivideOption, SchedulerOption, StoreOption, find_cluster
from exporters.cli.stages import resumable
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.lora.options import LoraOptions
from exporters.options import KV_DTYPES
from exporters.pipeline.place import open_checkpoint
from exporters.prepared import export_geometry
from exporters.progress import shown
from exporters.quantize.as_stored import AS_STORED
from exporters.quantize.recipe import find_recipe
from exporters.quantize.sink import SinkWanted

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

DEFAULT_RECIPE = "w8a16"

Name = TypeVar("Name", bound=str)


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A Hugging Face checkpoint folder, a GGUF file, a hub id such as org/model, or their URL."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle's folder; must not exist yet.")],
    device: DeviceOption,
    lora: Annotated[
        Optional[list[str]],
        typer.Option(
            "--lora", metavar="DIR[=SCALE]", help="A LoRA adapter (peft) to merge into the weights; repeat for several."
        ),
    ] = None,
    lora_slots: Annotated[
        Optional[int],
        typer.Option(
            metavar="RANK",
            help="Give every graph inputs for adapters up to this rank, which `edgekv lora add` adds later.",
            show_default="none",
        ),
    ] = None,
    lora_targets: Annotated[
        Optional[str],
        typer.Option(
            help="Projections with slots: q, k, v, o, gate, up, down, comma-separated.", show_default="all of them"
        ),
    ] = None,
    lora_reach: Annotated[
        Optional[float],
        typer.Option(
            help="How far adapters may change a projection, relative to its range on the calibration text.",
            show_default="1",
        ),
    ] = None,
    lora_calibrate: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="DIR[=SCALE]",
            help="An adapter that the slots are made to fit closely; repeat for several.",
            show_default="a stated range",
        ),
    ] = None,
    context: Annotated[
        str, typer.Option(help="Context length S in tokens; a comma-separated list for several, such as 512,1024,4096.")
    ] = "512",
    ar: Annotated[
        str, typer.Option("--ar", help="Tokens per inference of each graph, comma-separated, with 1.")
    ] = "1,32",
    draft_rows: Annotated[
        Optional[str],
        typer.Option(
            help="Tokens per inference of graphs that verify drafts for --speculate, comma-separated, such as 8,16.",
            show_default="none",
        ),
    ] = None,
    max_attention_window: Annotated[
        Optional[str],
        typer.Option(
            help="Attention window of each layer in tokens, comma-separated; a shorter list is repeated.",
            show_default="the model's own",
        ),
    ] = None,
    recipe: Annotated[
        Optional[str],
        typer.Option(
            help="Integer types: w8a16, w4a16, w4a16-lpbq32, -lpbq64, -lpbq128, -lpbq32-updown8, as-stored, or a "
            "recipe file (.json).",
            show_default="w8a16; as-stored for a quantized checkpoint",
        ),
    ] = None,
    graph_format: Annotated[
        str, typer.Option("--format", help="Graph format: onnx, or tflite for LiteRT and tflite-runtime.")
    ] = "onnx",
    kv: Annotated[
        Optional[str],
        typer.Option(
            help="Integer type of the KV cache: u8, or s16 (HTP V73 and later).",
            show_default="u8; s8 with --format tflite",
        ),
    ] = None,
    state_bits: Annotated[int, typer.Option(help="Bits of the states of short convolutions: 8 or 16.")] = 16,
    key_layout: Annotated[str, typer.Option(help="Key layout: rows [S, D], or columns [D, S].")] = "rows",
    splits: Annotated[
        Optional[int],
        typer.Option(
            help="Number of parts to split the layers into.", show_default="1, or as many as the size limits require"
        ),
    ] = None,
    embedding: Annotated[
        Optional[str],
        typer.Option(
            help="Where embeddings are looked up: graph, or host (a memory-mapped table).",
            show_default="graph; host with --splits",
        ),
    ] = None,
    head: Annotated[
        Optional[str],
        typer.Option(
            help="Where lm_head is: own (a separate part that all graphs share), or last (in the last part).",
            show_default="last; own with --splits",
        ),
    ] = None,
    sink: Annotated[
        str,
        typer.Option(
            help="Tokens at position 0 whose keys and values are stored in float precision and never computed by the "
            "graphs: auto (bos, if it spans the ranges), none, or token ids."
        ),
    ] = "auto",
    calibration: Annotated[Optional[Path], typer.Option(help="UTF-8 calibration text.")] = None,
    calibration_tokens: Annotated[
        Optional[int],
        typer.Option(
            help="Calibration tokens to use at most.", show_default="12800; 4096 for 500 M parameters or more"
        ),
    ] = None,
    learn_rounding: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Learn the rounding of weights on TOKENS more tokens, which the float model writes itself, with "
            "coordinate descent after GPTQ. Worth it in 4 bits; 32768 tokens take minutes for each 100 M parameters.",
            show_default="off",
        ),
    ] = 0,
    allow_float: Annotated[bool, typer.Option("--allow-float", help="Accept nodes that compute in float.")] = False,
    skip_htp_check: Annotated[
        bool, typer.Option("--skip-htp-check", help="Skip the HTP compiler's check; the manifest records it.")
    ] = False,
    compile_too: Annotated[
        bool, typer.Option("--compile", help="Also write context binaries, in the same compiler run.")
    ] = False,
    max_ram: Annotated[
        Optional[str],
        typer.Option(help="RAM limit for edgekv, such as 4GB; the HTP compiler's RAM is not included."),
    ] = None,
    cache_dir: CacheOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted export.")] = False,
    keep_stages: Annotated[
        bool,
        typer.Option(
            "--keep-stages", help="Keep finished pieces, so that --resume with another recipe reuses unchanged ones."
        ),
    ] = False,
    scheduler: SchedulerOption = None,
    store: StoreOption = None,
    divide_layers: DivideOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint as a bundle of static integer graphs.

    Every graph is compiled with the HTP compiler; the export is refused if any node would compute in float.
    """
    options = ExportOptions(
        device=find(device),
        recipe=find_recipe(recipe or DEFAULT_RECIPE),
        context=parse_numbers("--context", context),
        ar=parse_numbers("--ar", ar),
        draft_rows=() if draft_rows is None else parse_numbers("--draft-rows", draft_rows),
        max_attention_window=()
        if max_attention_window is None
        else parse_numbers("--max-attention-window", max_attention_window),
        kv_dtype=_kv_dtype(kv, _graph_format(graph_format)),
        state_bits=state_bits,
        key_layout=_key_layout(key_layout),
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        learn_tokens=learn_rounding,
        allow_float=allow_float,
        check_on_htp=not skip_htp_check,
        compile=compile_too,
        graph_format=_graph_format(graph_format),
        splits=splits,
        embedding=_choice("--embedding", embedding, ("graph", "host")),
        head=_choice("--head", head, ("own", "last")),
        sink=SinkWanted.parse(sink),
        lora=LoraOptions.parse(lora_slots, lora_targets, lora_reach, lora_calibrate or ()),
    )
    run = RunOptions(
        max_ram_bytes=None if max_ram is None else parse_bytes("--max-ram", max_ram),
        cache_dir=cache_dir,
        store=store,
        resume=resume,
        keep_stages=keep_stages,
        cluster=find_cluster(scheduler, divide=divide_layers),
    )
    adapters = [AdapterChoice.parse("--lora", each) for each in lora or []]
    with shown() as bars, resumable(bars) as progress:
        opened = open_checkpoint(checkpoint, adapters)
        if recipe is None and opened.quantization is not None:
            options = replace(options, recipe=find_recipe(AS_STORED))
        geometry = export_geometry(opened.limited(options.max_attention_window), options)
        for warning in mask_warnings(geometry, options.ar, options.device):
            typer.echo(f"edgekv: warning: {warning}", err=True)
        peaks: dict[str, int] = {}
        watch = peaks.__setitem__
        manifest = export_bundle(opened, output, options, run, force=force, progress=progress, watch=watch)
    if as_json:
        print_json(manifest)
        return
    for line in export_lines(output, manifest, opened):
        typer.echo(line)
    if compile_too:
        compiled = open_compiled(open_bundle(output, verify=False), manifest.device, qnn.compiler())
        assert compiled is not None, "written just now"
        show_compiled(compiled.path, compiled.manifest, peaks)
    typer.echo(next_line(output, manifest, is_compiled=compile_too))


def _kv_dtype(value: str | None, graph_format: GraphFormat) -> KvDtype:
    dtypes = KV_DTYPES[graph_format]
    if value is None:
        return dtypes[0]
    if value in ("u8", "s8", "s16"):
        return cast(KvDtype, value)
    raise UsageError(
        "--kv",
        got=repr(value),
        expected=" or ".join(dtypes),
        fix=f"Use {dtypes[0]}. The HTP compiler silently reduces u16 to 8 bits.",
    )


def _graph_format(value: str) -> GraphFormat:
    if value in KV_DTYPES:
        return value
    raise UsageError("--format", got=repr(value), expected=" or ".join(KV_DTYPES), fix="Use onnx or tflite.")


def _choice(option: str, value: str | None, names: Sequence[Name]) -> Name | None:
    found = [name for name in names if name == value]
    if value is None or found:
        return found[0] if found else None
    raise UsageError(option, got=repr(value), expected=" or ".join(names), fix=f"Use {option} {names[0]}.")


def _key_layout(value: str) -> KeyLayout:
    if value in ("rows", "columns"):
        return cast(KeyLayout, value)
    raise UsageError("--key-layout", got=repr(value), expected="rows or columns", fix="Use rows.")
