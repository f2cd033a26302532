"""From a checkpoint to a bundle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgekv.bundle import Manifest, check_target
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import open_store
from exporters.htp.compile import Watch, unwatched
from exporters.options import ExportOptions, RunOptions
from exporters.pipeline.assemble import assemble
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.place import Identity, Place, remember
from exporters.pipeline.planning import Planner
from exporters.pipeline.quality import quality_bytes
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import MissingPieceError, PieceStore
from exporters.preconditions import check_compiler
from exporters.prepared import Prepared, prepare
from exporters.progress import Progress, one_step, silent
from exporters.resources import bundle_bytes, check_disk, check_ram, full_disk_named, stage_bytes

__all__ = ["ExportOptions", "RunOptions", "export_bundle"]

_PLAIN = RunOptions()
_ATTEMPTS = 5


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

    The work is done in pieces, each named after all that it reads. They are kept in a store until the bundle is
    complete, so that an interrupted export can be resumed.

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
        ServiceError: the scheduler cannot be reached, or vanished.
        EngineError: the HTP compiler is not installed, refused a graph, or computes part of it in float.
    """
    check_target(target, force=force)
    check_compiler(options)
    with one_step("prepare", progress):
        prepared = prepare(checkpoint, options)
    store = open_store(run)
    disk_bytes = _check_resources(prepared, target, store, run)
    identity, place = Identity.of(checkpoint, partial(progress, "hash weights")), Place.of(checkpoint)
    planner = Planner(identity, divide=run.cluster is not None and run.cluster.divide)
    exported = planner.export(prepared)
    remember(checkpoint, identity)
    inputs = Inputs(store, place, progress, keeps_files=True)
    inputs.take(exported.folded.exact, checkpoint, prepared.checkpoint)

    def make(*, again: bool) -> Manifest:
        plan, names = planner.plan, exported.names
        if run.cluster is not None:
            from exporters.pipeline.dask.run import run_on  # its packages are optional

            run_on(run.cluster, plan, names, store, place, identity, progress, disk_bytes=2 * disk_bytes)
        else:
            run_serial(plan, names, inputs, progress, resume=run.resume or again)
        with full_disk_named(target, "the bundle", disk_bytes), one_step("seal", progress):
            allow = options.allow_float
            return assemble(exported, options.device, store, target, force=force, allow_float=allow, watch=watch)

    for attempt in range(_ATTEMPTS):
        try:
            manifest = make(again=attempt > 0)
            break
        except (MissingPieceError, FileNotFoundError):  # another export has removed pieces that both had
            if attempt == _ATTEMPTS - 1:
                raise
    if run.removes_pieces:
        store.remove([*planner.plan.under(exported.names), *planner.plan.given])
    return manifest


def _check_resources(prepared: Prepared, target: Path, store: PieceStore, run: RunOptions) -> int:
    """Refuse an export that needs more RAM or disk space than there is; returns the size of its bundle.

    Raises:
        UsageError: more RAM is needed than allowed.
        BundleError: a disk has not enough space.
    """
    spec = prepared.checkpoint.spec
    windows, window = prepared.survey_tokens.shape
    tokens = (windows + prepared.learned_windows) * window
    disk_bytes = bundle_bytes(spec, prepared.options.recipe, len(prepared.graphs))
    in_memory = disk_bytes if prepared.options.graph_format == "tflite" else 0
    options = prepared.options
    check_ram(
        spec,
        tokens,
        window,
        in_memory,
        run.max_ram_bytes,
        generates=prepared.learned_windows > 0,
        quality_bytes=quality_bytes(spec, options.contexts[-1]) if options.check_quality else 0,
    )
    check_disk({target: disk_bytes, store.folder: stage_bytes(spec, tokens)})
    return disk_bytes
