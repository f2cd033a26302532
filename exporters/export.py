"""From a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from edgekv import qnn
from edgekv.bundle import (
    MANIFEST,
    CompiledBinary,
    GraphRecord,
    HtpCheck,
    Manifest,
    atomic_directory,
    check_target,
    record_files,
    write_manifest,
)
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.contents import make_manifest, write_contents
from exporters.htp.check import float_verdict
from exporters.htp.compile import Watch, compile_binaries, device_parts, unwatched, write_compiled
from exporters.options import ExportOptions, RunOptions
from exporters.parallel import Job, compiler_bytes, side_by_side
from exporters.preconditions import check_compiler
from exporters.prepared import prepare
from exporters.progress import Progress, one_step, silent
from exporters.quantize.as_stored import stored_record
from exporters.quantize.generated import GeneratedText
from exporters.quantize.stages import Checks, FinishedBinaries, quantize_in_stages, stage_keys, stage_store
from exporters.records import source_record
from exporters.resources import bundle_bytes, check_disk, check_ram, full_disk_named, stage_bytes

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
    with one_step("prepare", progress):
        prepared = prepare(checkpoint, options)
    checkpoint, options, recipe, graphs = prepared.checkpoint, prepared.options, prepared.recipe, prepared.graphs
    spec, context = checkpoint.spec, options.contexts[-1]
    count, window = prepared.survey_tokens.shape
    learned_windows = -(-options.learn_tokens // window)
    all_tokens = (count + learned_windows) * window
    store = stage_store(run.cache_dir)
    disk = {target: bundle_bytes(spec, options.recipe, len(graphs)), store.folder: stage_bytes(spec, all_tokens)}
    in_memory = disk[target] if options.graph_format == "tflite" else 0
    check_ram(spec, all_tokens, window, in_memory, run.max_ram_bytes, generates=learned_windows > 0)
    check_disk(disk)
    checkpoint.check_values(partial(progress, "read"))
    stored = stored_record(checkpoint, options.recipe, partial(progress, "compare integers"))
    weights_sha256 = checkpoint.weights_sha256(partial(progress, "hash weights"))
    found = prepared.survey(progress)
    with one_step("sink, heads", progress):
        surveyed = prepared.decide(found)
    starts = prepared.first if surveyed.sink else None
    generated = _generated(checkpoint, weights_sha256, starts, window, learned_windows, store.folder)
    with full_disk_named(store.folder, disk[store.folder], "stages"):
        learned = generated.windows(resume=run.resume, progress=partial(progress, "write text"))
    tokens = np.concatenate([surveyed.tokens, learned])
    tensors = transformed(checkpoint, recipe, surveyed.heads)
    keys = stage_keys(checkpoint, weights_sha256, tokens, context, recipe, surveyed.sink_tokens, surveyed.heads)
    with full_disk_named(target, disk[target], "the bundle"), atomic_directory(target, force=force) as folder:
        with full_disk_named(store.folder, disk[store.folder], "stages"):
            matrices, ranges = quantize_in_stages(
                tensors,
                tokens,
                context,
                options.recipe,
                store,
                keys,
                sink=surveyed.sink_tokens,
                resume=run.resume,
                progress=progress,
            )
        contents = write_contents(prepared, surveyed, tensors, matrices, ranges, folder, progress)
        del ranges
        files = record_files(folder, partial(progress, "hash files"))
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
        source = source_record(checkpoint, weights_sha256, prepared.calibration.name, tokens.size, stored, learned.size)
        progress("seal", 0, 1)
        manifest = make_manifest(prepared, surveyed, contents, source, files, check, floating)
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


def _check(
    graphs: Sequence[GraphRecord], folder: Path, checks: Checks, *, allow_float: bool, progress: Progress
) -> tuple[HtpCheck, list[str]]:
    files = dict.fromkeys(part.file for graph in graphs for part in graph.parts)
    jobs = [Job(partial(checks.floating_nodes, folder / file), compiler_bytes([folder / file])) for file in files]
    floating = side_by_side(jobs, "check on HTP", progress)
    return float_verdict([node for nodes in floating for node in nodes], allow_float=allow_float)
