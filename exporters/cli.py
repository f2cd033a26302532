"""The commands that exporters add to `edgekv`: export, compile, eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Optional, TypeVar, cast

import msgspec
import typer

import edgekv
from devices import find
from edgekv.bundle import CompiledManifest, GraphFormat, open_bundle, open_compiled
from edgekv.cli.numbers import parse_numbers
from edgekv.errors import UsageError
from edgekv.kv import KeyLayout, KvDtype
from edgekv.runtime import make_engine, qnn
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.heads import transformed
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.htp.compile import compile_bundle
from exporters.inspect import layer_lines, measure_layers, parse_budget, proposal_lines, propose
from exporters.inspect.evaluate import evaluate, evaluation_windows, open_source, read_text
from exporters.options import KV_DTYPES
from exporters.progress import shown
from exporters.quantize.recipe import Recipe, check_recipe_path, describe_recipe, find_recipe
from exporters.quantize.stages import FinishedBinaries, stage_store
from exporters.quantize.stages.cli import resumable
from exporters.resources import parse_bytes

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

Name = TypeVar("Name", bound=str)

DeviceOption = Annotated[str, typer.Option("--device", help="Target: part number or name, such as SM8650.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CacheOption = Annotated[
    Optional[Path],
    typer.Option(
        "--cache-dir",
        help="Where what is finished is kept until all is.",
        show_default="EDGEKV_CACHE_DIR, or the user's own cache",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def export(
    checkpoint: Annotated[str, typer.Argument(help="A Hugging Face folder, or a hub id such as org/model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle's folder, to be made.")],
    device: DeviceOption,
    context: Annotated[
        str, typer.Option(help="Context length S in tokens; several with commas, such as 512,1024,4096.")
    ] = "512",
    ar: Annotated[str, typer.Option("--ar", help="Tokens per inference of each graph, with commas.")] = "1,32",
    max_attention_window: Annotated[
        Optional[str],
        typer.Option(
            help="Tokens that each layer attends to at most, with commas; repeated when shorter than the layers.",
            show_default="the model's own",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="Integer types: w8a16, w4a16, w4a16-lpbq32, -lpbq64, -lpbq128, or a recipe file (.json)."),
    ] = "w8a16",
    graph_format: Annotated[
        str, typer.Option("--format", help="What to write: onnx, or tflite for LiteRT and tflite-runtime.")
    ] = "onnx",
    kv: Annotated[
        Optional[str],
        typer.Option(
            help="Integer type of the KV cache: 8 bits, or s16 from V73 on.",
            show_default="u8; s8 with --format tflite",
        ),
    ] = None,
    key_layout: Annotated[
        str, typer.Option(help="How keys lie in the cache: rows, or columns, as Genie wants them.")
    ] = "rows",
    splits: Annotated[
        Optional[int],
        typer.Option(
            help="Parts that the layers are divided over.", show_default="1, while it stays inside all limits"
        ),
    ] = None,
    embedding: Annotated[
        Optional[str],
        typer.Option(
            help="Who looks embeddings up: graph, or host, from a mapped table.", show_default="graph; host with splits"
        ),
    ] = None,
    head: Annotated[
        Optional[str],
        typer.Option(
            help="The head: own, a part by itself that all graphs share, or last, in the last part of layers.",
            show_default="last; own with splits",
        ),
    ] = None,
    calibration: Annotated[Optional[Path], typer.Option(help="Text to calibrate on, instead of edgekv's own.")] = None,
    calibration_tokens: Annotated[
        Optional[int],
        typer.Option(
            help="How many tokens of it to use, if it has as many.", show_default="12800; 4096 from 500 M parameters on"
        ),
    ] = None,
    allow_float: Annotated[bool, typer.Option("--allow-float", help="Accept nodes that compute in float.")] = False,
    skip_htp_check: Annotated[
        bool, typer.Option("--skip-htp-check", help="Do not compile for the HTP; the bundle says that it is unchecked.")
    ] = False,
    compile_too: Annotated[
        bool, typer.Option("--compile", help="Write context binaries too; edgekv compile would run the compiler again.")
    ] = False,
    max_ram: Annotated[
        Optional[str],
        typer.Option(help="RAM that edgekv may hold, such as 4GB; the HTP compiler's own is not counted."),
    ] = None,
    cache_dir: CacheOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an export that was stopped.")] = False,
    keep_stages: Annotated[
        bool,
        typer.Option(
            "--keep-stages", help="Keep finished layers: another recipe with --resume begins where it differs."
        ),
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a checkpoint into a bundle.

    The bundle holds static integer graphs, each compiled for the HTP and refused if it would compute in float.
    """
    options = ExportOptions(
        device=find(device),
        recipe=find_recipe(recipe),
        context=parse_numbers("--context", context),
        ar=parse_numbers("--ar", ar),
        max_attention_window=()
        if max_attention_window is None
        else parse_numbers("--max-attention-window", max_attention_window),
        kv_dtype=_kv_dtype(kv, _graph_format(graph_format)),
        key_layout=_key_layout(key_layout),
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        allow_float=allow_float,
        check_on_htp=not skip_htp_check,
        compile=compile_too,
        graph_format=_graph_format(graph_format),
        splits=splits,
        embedding=_choice("--embedding", embedding, ("graph", "host")),
        head=_choice("--head", head, ("own", "last")),
    )
    run = RunOptions(
        max_ram_bytes=None if max_ram is None else parse_bytes("--max-ram", max_ram),
        cache_dir=cache_dir,
        resume=resume,
        keep_stages=keep_stages,
    )
    with shown() as bars, resumable(bars) as progress:
        opened = Checkpoint.open(checkpoint)
        peaks: dict[str, int] = {}
        manifest = export_bundle(opened, output, options, run, force=force, progress=progress, watch=peaks.__setitem__)
    if as_json:
        typer.echo(msgspec.json.encode(manifest))
        return
    held = sum(record.bytes for record in manifest.files.values())
    typer.echo(f"{output}: {opened.parameters / 1e6:.1f} M parameters, {manifest.recipe.name}, {held / 1e6:.1f} MB")
    typer.echo(f"  calibrated on {manifest.source.calibration_tokens:,} tokens of {manifest.source.calibration} text")
    for line in describe_recipe(manifest.recipe):
        typer.echo(f"  {line}")
    for graph in manifest.graphs:
        parts = f", in {len(graph.parts)} parts" if len(graph.parts) > 1 else ""
        typer.echo(f"  {graph.name}: {graph.role}, {graph.ar} tokens per inference, context {graph.context}{parts}")
    verdict = {
        "integers-only": f"every graph compiles for {manifest.device}, integers only",
        "float-allowed": f"compiles for {manifest.device}; {len(manifest.floating_nodes)} nodes compute in float",
        "not-run": "not checked on the HTP compiler",
    }
    typer.echo(f"  {verdict[manifest.htp_check]}")
    if compile_too:
        compiled = open_compiled(open_bundle(output, verify=False), manifest.device, qnn.compiler())
        assert compiled is not None, "it was just written"
        _show_compiled(compiled.path, compiled.manifest, peaks)


def compile_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    device: DeviceOption,
    each: Annotated[
        Optional[bool],
        typer.Option(
            "--each/--no-each",
            help="Add a binary for each graph by itself: the emulator on x86 loads no others.",
            show_default="added, unless the graphs are divided into parts",
        ),
    ] = None,
    cache_dir: CacheOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a compilation that was stopped.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write context binaries for a chip.

    They go into the bundle: for each part of the graphs one in which all graphs share its weights. The chip is read
    back from the binary.
    """
    target = find(device)
    opened = open_bundle(bundle)
    with shown() as progress:
        peaks: dict[str, int] = {}
        binaries = FinishedBinaries(stage_store(cache_dir).folder, opened.manifest.files, resume=resume)
        compiled = compile_bundle(
            opened,
            target,
            each=each,
            force=force,
            progress=progress,
            watch=peaks.__setitem__,
            make=binaries.compile,
        )
        binaries.remove()
    if as_json:
        typer.echo(msgspec.json.encode(msgspec.to_builtins(compiled) | {"peak_bytes": peaks}))
        return
    _show_compiled(bundle / "compiled" / compiled.soc, compiled, peaks)


def eval_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.")],
    engine: Annotated[
        str, typer.Option(help="Where the bundle runs: cpu or htp; of TFLite graphs litert or tflite.")
    ] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to predict at most.")] = 4096,
    layers: Annotated[
        bool, typer.Option("--layers", help="SQNR of every layer and tensor, and what to do about the worst ten.")
    ] = False,
    suggest_recipe: Annotated[
        Optional[Path],
        typer.Option(help="A recipe file (.json) to write: int8 for the matrices that gain most by it."),
    ] = None,
    size_budget: Annotated[
        str, typer.Option(help="What the weights may become with it: 1.2x of what they are, or bytes.")
    ] = "1.2x",
    checkpoint: Annotated[
        Optional[str], typer.Option(help="The checkpoint, if it is not where the bundle was made from.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a bundle with its checkpoint.

    Perplexity on a text beside that of the float32 reference, and how often both hold the same token most likely. With
    --layers, where quality went; with --suggest-recipe, where a few bytes would bring most of it back.
    """
    content = read_text(text)
    budget = parse_budget("--size-budget", size_budget)
    if suggest_recipe is not None:
        check_recipe_path(suggest_recipe)
    model = edgekv.load(bundle, engine=engine)
    manifest = model.bundle.manifest
    source = open_source(manifest, checkpoint)
    report = proposal = None
    with shown() as progress:
        if layers or suggest_recipe is not None:
            windows = evaluation_windows(source, content, manifest.context, tokens)
            tensors = transformed(source, manifest.recipe)
            if suggest_recipe is not None:
                proposal = propose(model.bundle, tensors, windows, budget, progress)
            runner = make_engine(engine, bundle=model.bundle)
            report = measure_layers(model.bundle, runner, tensors, windows, text.name, progress)
            report, result = msgspec.structs.replace(report, proposal=proposal), report.evaluation
        else:
            result = evaluate(model, source, content, text.name, tokens=tokens, progress=progress)
    if proposal is not None and suggest_recipe is not None:
        proposal.recipe(Recipe.of(manifest.recipe)).write(suggest_recipe)
    if as_json:
        typer.echo(msgspec.json.encode(report or result))
        return
    typer.echo(f"{result.tokens} tokens of {result.text} on {result.engine}")
    typer.echo(f"  perplexity      {result.perplexity:.4f}, {result.perplexity_ratio:.5f} x the reference's")
    typer.echo(f"  reference       {result.reference_perplexity:.4f} (float32)")
    typer.echo(f"  top-1 agreement {result.top1_agreement:.2%}")
    typer.echo(f"  SQNR            {result.sqnr_db:.1f} dB")
    if report is not None:
        for line in layer_lines(report):
            typer.echo(line)
    if proposal is not None:
        for line in proposal_lines(proposal, str(suggest_recipe)):
            typer.echo(line)


def _show_compiled(folder: Path, compiled: CompiledManifest, peaks: Mapping[str, int]) -> None:
    vtcm = compiled.vtcm_bytes >> 20
    typer.echo(f"{folder}: {compiled.soc}, V{compiled.arch}, {vtcm} MiB VTCM")
    for binary in compiled.binaries:
        size = compiled.files[binary.file].bytes / 1e6
        held = "weights shared by " if binary.graphs > 1 else ""
        peak = f"; compiled in {peaks[binary.file] / 1e9:.2f} GB of RAM" if binary.file in peaks else ""
        typer.echo(f"  {binary.file}: {size:.2f} MB, {held}{', '.join(binary.wrappers)}{peak}")


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
        fix=f"Use {dtypes[0]}; u16 would be cut to 8 bits by the HTP compiler without a word.",
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
