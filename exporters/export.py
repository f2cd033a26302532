"""From a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv import qnn
from edgekv.bundle import (
    FORMAT,
    MANIFEST,
    CompiledBinary,
    GraphRecord,
    HtpCheck,
    Manifest,
    RopeRecord,
    atomic_directory,
    check_target,
    record_files,
    write_manifest,
)
from edgekv.errors import EngineError
from edgekv.plan import CALIBRATION_WINDOW, default_calibration_tokens
from edgekv.spec import DecoderInterface, EncodingTypes, Geometry, LayeredGeometry
from edgekv.spec.chat import write_templates
from exporters.checkpoint.aligned import AlignedHeads, cache_encodings, write_heads
from exporters.checkpoint.channels import outlier_channels
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.graphs.onnx import embedding_record, plan_graphs, write_graphs
from exporters.graphs.split import Split, choose_split
from exporters.htp.compile import Watch, compile_binaries, device_parts, unwatched, write_compiled
from exporters.options import ExportOptions, RunOptions
from exporters.parallel import compiler_processes, side_by_side
from exporters.preconditions import check_compiler, check_fit
from exporters.progress import Progress, silent
from exporters.quantize.as_stored import resolve, stored_record
from exporters.quantize.calibrate import calibration_windows, read_calibration
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.generated import GeneratedText
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.reference import Tensors
from exporters.quantize.sink import first_tokens
from exporters.quantize.stages import Checks, FinishedBinaries, quantize_in_stages, stage_keys, stage_store
from exporters.records import model_record, recipe_record, rope_record, sink_record, source_record, token_record
from exporters.resources import bundle_bytes, check_disk, check_ram, full_disk_named, stage_bytes
from exporters.surveyed import survey_checkpoint
from quant import Encoding, Range

__all__ = ["ExportOptions", "RunOptions", "export_bundle"]

_PLAIN = RunOptions()


def export_bundle(
    checkpoint: Checkpoint,
    target: Path,
    options: ExportOptions,
    run: RunOptions = _PLAIN,
    *,
    force: bool = False,
    progress: Progress = silent,
    watch: Watch = unwatched,
) -> Manifest:
    """Calibrate, quantize, write graphs and weights, check them with the HTP compiler, and put the bundle in place.

    Every finished layer and binary is kept in a cache directory until the bundle is complete, so that an interrupted
    export can be resumed.

    Args:
        checkpoint: the checkpoint.
        target: the bundle's folder; it appears atomically.
        options: options that determine the bundle.
        run: options that do not.
        force: replace an existing bundle.
        progress: called for each step.
        watch: called with the peak RAM of compiling each context binary, if there are any.

    Raises:
        UsageError: the options do not fit the checkpoint, the target exists, or more RAM is needed than allowed.
        BundleError: a disk is full, or cannot be written.
        EngineError: the HTP compiler is not installed, refused a graph, or computes part of it in float.
    """
    check_target(target, force=force)
    check_compiler(options)
    checkpoint = checkpoint.limited(options.max_attention_window)
    options = replace(options, recipe=resolve(options.recipe, checkpoint))
    if options.learn_tokens:
        options = replace(options, recipe=options.recipe.learned())
    check_fit(checkpoint, options)
    channels = outlier_channels(checkpoint.spec, checkpoint.tensor) if options.recipe.splits_channels else []
    checkpoint = checkpoint.split(channels)
    spec, context = checkpoint.spec, options.contexts[-1]
    recipe = recipe_record(spec, options.recipe, channels)
    split = _split(checkpoint, options)
    graphs = plan_graphs(options.ar, options.contexts, split, options.graph_format, verify=options.verify)
    calibration = read_calibration(options.calibration, checkpoint.folder)
    first = first_tokens(checkpoint, options.sink)
    tokens = _calibration_tokens(checkpoint, calibration.text, options, first)
    window = tokens.shape[1]
    learned_windows = -(-options.learn_tokens // window)
    all_tokens = tokens.size + learned_windows * window
    store = stage_store(run.cache_dir)
    disk = {target: bundle_bytes(spec, options.recipe, len(graphs)), store.folder: stage_bytes(spec, all_tokens)}
    in_memory = disk[target] if options.graph_format == "tflite" else 0
    check_ram(spec, all_tokens, window, in_memory, run.max_ram_bytes, generates=learned_windows > 0)
    check_disk(disk)
    checkpoint.check_values(lambda done, of: progress("read", done, of))
    stored = stored_record(checkpoint, options.recipe)
    weights_sha256 = checkpoint.weights_sha256()
    sink, heads = survey_checkpoint(checkpoint, tokens, first, options)
    if sink is None:
        tokens = _calibration_tokens(checkpoint, calibration.text, options)
    sink_tokens = 0 if sink is None else len(sink.tokens)
    generated = _generated(checkpoint, weights_sha256, first if sink else None, window, learned_windows, store.folder)
    with full_disk_named(store.folder, disk[store.folder], "stages"):
        learned = generated.windows(resume=run.resume, progress=partial(progress, "write text"))
    tokens = np.concatenate([tokens, learned])
    tensors = transformed(checkpoint, recipe, heads)
    keys = stage_keys(checkpoint, weights_sha256, tokens, context, recipe, sink_tokens, heads)
    with full_disk_named(target, disk[target], "the bundle"), atomic_directory(target, force=force) as folder:
        with full_disk_named(store.folder, disk[store.folder], "stages"):
            matrices, ranges = quantize_in_stages(
                tensors,
                tokens,
                context,
                options.recipe,
                store,
                keys,
                sink=sink_tokens,
                resume=run.resume,
                progress=lambda done: progress("quantize", done, spec.layers),
            )
        ropes = [rope_record(rope, context) for rope in spec.ropes]
        encodings = _write(tensors, matrices, ranges, ropes, graphs, heads, folder, options, progress)
        del ranges
        if sink is not None:
            sink.write(folder, encodings)
        checkpoint.write_tokenizer(folder / "tokenizer.json")
        if checkpoint.chat is not None:
            write_templates(checkpoint.chat, folder)
        progress("seal", 0, 1)
        files = record_files(folder)
        checks = Checks(store.folder, options.device, files, resume=run.resume)
        finished = FinishedBinaries(store.folder, files, resume=run.resume, lint=checks.keep)
        compiled, binaries = folder / "compiled" / options.device.soc, list[CompiledBinary]()
        if options.compile:
            compiled.mkdir(parents=True)
            whole = all(graph.is_whole for graph in graphs)
            parts = device_parts(graphs, folder)
            binaries = compile_binaries(parts, options.device, compiled, whole, progress, watch, finished.compile)
        check: HtpCheck = "not-run"
        floating: list[str] = []
        if options.graph_format == "onnx" and options.check_on_htp:
            check, floating = _check(graphs, folder, checks, allow_float=options.allow_float, progress=progress)
        manifest = Manifest(
            format=FORMAT,
            producer=f"edgekv {metadata.version('edgekv')}",
            device=options.device.soc,
            recipe=recipe,
            kv_dtype=options.kv_dtype,
            key_layout=options.key_layout,
            context=context,
            htp_check=check,
            floating_nodes=floating,
            model=model_record(checkpoint),
            rope=ropes[0],
            local_rope=ropes[1] if len(ropes) > 1 else None,
            local_layers=[] if spec.local_rope is None else spec.layers_with(spec.local_rope),
            unrotated_layers=sorted(spec.unrotated),
            embedding=embedding_record(split),
            tokens=token_record(checkpoint),
            generation=checkpoint.generation,
            graphs=graphs,
            encodings=encodings,
            source=source_record(checkpoint, weights_sha256, calibration.name, tokens.size, stored, learned.size),
            files=files,
            windows=list(spec.windows_in(context)),
            graph_format=options.graph_format,
            sink=None if sink is None else sink_record(sink),
        )
        write_manifest(folder, manifest)
        if options.compile:
            write_compiled(compiled, options.device, binaries, qnn.compiler(), folder / MANIFEST)
        progress("seal", 1, 1)
    finished.remove()
    checks.remove()
    if not run.keep_stages:
        store.remove(keys)
        generated.remove()
    return manifest


def _calibration_tokens(
    checkpoint: Checkpoint, text: str, options: ExportOptions, first: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """`[windows, T]`; each window begins with the tokens `first`, or with the BOS token, if there is one."""
    tokens = options.calibration_tokens or default_calibration_tokens(checkpoint.spec.sizes)
    window = min(CALIBRATION_WINDOW, options.contexts[-1], tokens)
    return np.stack(calibration_windows(checkpoint, text, window, tokens, first=first))


def _generated(
    checkpoint: Checkpoint,
    weights_sha256: str,
    first: Sequence[int] | None,
    length: int,
    windows: int,
    folder: Path,
) -> GeneratedText:
    """Text that the model writes, in windows that begin as those of `_calibration_tokens` do."""
    if first is None:
        first = [] if checkpoint.special.bos is None else [checkpoint.special.bos]
    return GeneratedText(checkpoint, weights_sha256, first, length, windows, folder)


def _write(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    ranges: Mapping[str, Range],
    ropes: Sequence[RopeRecord],
    graphs: Sequence[GraphRecord],
    heads: AlignedHeads | None,
    folder: Path,
    options: ExportOptions,
    progress: Progress,
) -> dict[str, Encoding]:
    """Write the graphs in the requested format; return the encodings, which depend on the format."""

    def done(layers: int) -> None:
        progress("write", layers, tensors.spec.layers)

    is_tflite = options.graph_format == "tflite"
    types = EncodingTypes("s16" if is_tflite else options.recipe.activations, options.kv_dtype)
    decoder = DecoderInterface.of(
        tensors.spec, options.contexts[-1], options.kv_dtype, options.key_layout, types.activations
    )
    factors = [rope.attention_factor for rope in ropes]
    encodings = choose_encodings(decoder_results(tensors.spec), ranges, factors, types)
    if heads is not None:
        encodings |= cache_encodings(heads, options.kv_dtype)
        write_heads(heads, folder)
    if is_tflite:
        from exporters.graphs.tflite.graphs import write_tflite  # its package is optional

        write_tflite(tensors, matrices, decoder, encodings, graphs, folder, done)
        return encodings
    return write_graphs(tensors, matrices, decoder, encodings, graphs, folder, done)


def export_geometry(checkpoint: Checkpoint, options: ExportOptions) -> Geometry | LayeredGeometry:
    """The cache of the graphs for the longest context."""
    context = options.contexts[-1]
    return DecoderInterface.of(checkpoint.spec, context, options.kv_dtype, options.key_layout, "u16").cache


def _split(checkpoint: Checkpoint, options: ExportOptions) -> Split:
    spec = checkpoint.spec
    if options.graph_format == "tflite":
        return Split.whole(spec.layers)
    return choose_split(
        spec,
        options.recipe,
        splits=options.splits,
        embedding=options.embedding,
        head=options.head,
        geometry=export_geometry(checkpoint, options),
        ar=options.ar,
        graphs=(len(set(options.ar)) + len(set(options.verify))) * len(options.contexts),
    )


def _check(
    graphs: Sequence[GraphRecord], folder: Path, checks: Checks, *, allow_float: bool, progress: Progress
) -> tuple[HtpCheck, list[str]]:
    files = dict.fromkeys(part.file for graph in graphs for part in graph.parts)
    work = [partial(checks.floating_nodes, folder / file) for file in files]
    floating = side_by_side(work, compiler_processes(), "check on HTP", progress)
    found = [node for nodes in floating for node in nodes]
    if not found:
        return "integers-only", []
    if not allow_float:
        raise EngineError(
            "float check",
            got=f"{len(found)} nodes that compute in float, the first: {', '.join(found[:3])}",
            expected="integers only",
            fix="Report this model, or accept the slow nodes with --allow-float.",
        )
    return "float-allowed", found
