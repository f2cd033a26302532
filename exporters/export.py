"""From a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

from edgekv.bundle import Manifest, check_new
from edgekv.spec.tensors import matrices
from exporters.allocate import allocated, decode_speed
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import open_store
from exporters.drafter import Drafter, check_options
from exporters.htp.compile import Watch, unwatched
from exporters.options import ExportOptions as ExportOptions, RunOptions as RunOptions
from exporters.pipeline.drafter import plan_drafter
from exporters.pipeline.inputs import DecoderKey, Inputs
from exporters.pipeline.piece import Plan
from exporters.pipeline.place import Identity, Place, remember
from exporters.pipeline.planning import Planner
from exporters.pipeline.quality import quality_bytes
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import MissingPieceError, PieceStore
from exporters.pipeline.write import ExportResult, assemble
from exporters.plan import ExportPlan, plan_export
from exporters.preconditions import check_compiler
from exporters.progress import Progress, one_step, silent
from exporters.quantize.matrices import needs_quantized_pass
from exporters.quantize.windows import Room
from exporters.resources import bundle_bytes, check_disk, check_ram, full_disk_named, residual_every, stage_bytes

_PLAIN = RunOptions()
_ATTEMPTS = 5

T = TypeVar("T")


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
    check_new(target, force=force)
    check_compiler(options)
    options = options.for_checkpoint(is_quantized=checkpoint.quantization is not None)
    if options.allocates and options.graph_format == "onnx":
        options = replace(options, recipe=options.recipe.for_blocks())
    with one_step("prepare", progress):
        export = plan_export(checkpoint, options)
    store = open_store(run)
    disk_bytes, room_bytes, every = _check_resources(export, target, store, run)
    identity = Identity.of(checkpoint, partial(progress, "hash weights"))
    planner = Planner(identity, residual_every=every)
    remember(checkpoint, identity)
    place = Place.of(checkpoint)
    work = _Work(checkpoint, planner.plan, place, identity, run, store, progress, disk_bytes, room_bytes)
    if options.allocates:
        speed = None if options.target_tokens_per_s is None else decode_speed(export, run, progress)
        export = allocated(checkpoint, options, export, planner, work.finished, speed)
    return work.bundle(export.checkpoint, planner.export(export), target, options, force=force, watch=watch)


def export_drafter(
    drafter: Drafter,
    output: Path,
    options: ExportOptions,
    run: RunOptions = _PLAIN,
    *,
    force: bool = False,
    progress: Progress = silent,
) -> Manifest:
    """Calibrate and quantize a drafter, and write its bundle: a graph of one token for each context of its target.

    A drafter with a cache of its own has graphs of as many tokens as its target prefills, too. It is made of pieces, as
    a model of its own is.

    Args:
        drafter: and its target.
        output: the bundle's folder; it appears atomically.
        options: recipe, effort, calibration and checks; what concerns the cache is the target's.
        run: options that do not determine the bundle.
        force: replace an existing bundle.
        progress: called for each step.

    Raises:
        UsageError: options that a drafter does not have, the folder exists, or more RAM is needed than allowed.
        CheckpointError: a tensor of the drafter has values that no graph can represent.
        BundleError: a disk is full, or cannot be written.
        ServiceError: the scheduler cannot be reached, or vanished.
        EngineError: the HTP compiler is not installed, refused a graph, or computes part of it in float.
    """
    check_options(options)
    check_new(output, force=force)
    check_compiler(options)
    options = options.for_checkpoint(is_quantized=False)
    store, checkpoint, plan = open_store(run), drafter.checkpoint, Plan()
    identity = Identity.of(checkpoint, partial(progress, "hash weights"), target=drafter.target)
    remember(checkpoint, identity, drafter)
    planned = plan_drafter(plan, drafter, options, identity)
    spec = drafter.source.spec  # it runs too
    writes = planned.written_windows > 0
    room_bytes = check_ram(spec, planned.tokens, planned.window, 0, run.max_ram_bytes, generates=writes)
    written_bytes = spec.sizes.table_parameters + sum(prod(shape) for shape in matrices(drafter.spec).values())
    check_disk({output: written_bytes, store.folder: stage_bytes(spec, planned.tokens)})
    place = Place.of(checkpoint, drafter.target)
    work = _Work(checkpoint, plan, place, identity, run, store, progress, written_bytes, room_bytes)
    return work.bundle(checkpoint, planned.result, output, options, force=force)


@dataclass(slots=True)
class _Work:
    """Makes pieces of exports of one checkpoint.

    Attributes:
        checkpoint: the checkpoint.
        plan: the pieces.
        place: of the checkpoint.
        identity: of the checkpoint.
        run: where pieces run.
        store: where they are kept.
        progress: called for each step.
        bundle_bytes: estimated size of the bundle; workers need twice as much space.
        room_bytes: RAM for the values of calibration windows.
    """

    checkpoint: Checkpoint
    plan: Plan
    place: Place
    identity: Identity
    run: RunOptions
    store: PieceStore
    progress: Progress
    bundle_bytes: int
    room_bytes: int
    _inputs: Inputs = field(init=False)
    _resumes: bool = field(init=False)

    def __post_init__(self) -> None:
        room = Room(self.room_bytes)
        self._inputs = Inputs(self.store, self.place, self.progress, keeps_files=True, room=room)
        self._resumes = self.run.resume

    def bundle(
        self,
        derived: Checkpoint,
        result: ExportResult,
        target: Path,
        options: ExportOptions,
        *,
        force: bool,
        watch: Watch = unwatched,
    ) -> Manifest:
        """Make all pieces of a bundle, put it in place, and remove them unless they are to be kept."""

        def sealed(store: PieceStore) -> Manifest:
            with full_disk_named(target, "the bundle", self.bundle_bytes), one_step("seal", self.progress):
                allow = options.allow_float
                return assemble(result, options.device, store, target, force=force, allow_float=allow, watch=watch)

        manifest = self.finished(derived, result.decoder, result.names, sealed)
        if self.run.removes_pieces:
            self.store.remove([*self.plan.pieces, *self.plan.sources])
        return manifest

    def finished(
        self, derived: Checkpoint, decoder: DecoderKey, names: Sequence[str], read: Callable[[PieceStore], T]
    ) -> T:
        """Make pieces, and read what is wanted of them.

        Both are repeated if another export removes pieces that it shares.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self._make(derived, decoder, names)
                return read(self.store)
            except (MissingPieceError, FileNotFoundError):
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _make(self, derived: Checkpoint, decoder: DecoderKey, names: Sequence[str]) -> None:
        self._inputs.take(decoder, self.checkpoint, derived)
        resumes, self._resumes = self._resumes, True
        if self.run.cluster is None:
            run_serial(self.plan, names, self._inputs, self.progress, resume=resumes)
            return
        from exporters.pipeline.dask.run import run_on  # its packages are optional

        cluster, most = self.run.cluster, 2 * self.bundle_bytes
        run_on(cluster, self.plan, names, self.store, self.place, self.identity, self.progress, disk_bytes=most)


def _check_resources(export: ExportPlan, target: Path, store: PieceStore, run: RunOptions) -> tuple[int, int, int]:
    """Refuse an export that needs more RAM or disk space than there is.

    Returns:
        The size of its bundle, the RAM that is left for the values of calibration windows, and of how many layers one
        stores its residual.

    Raises:
        UsageError: more RAM is needed than allowed.
        BundleError: a disk has not enough space.
    """
    spec = export.checkpoint.spec
    windows, window = export.survey_tokens.shape
    tokens = (windows + export.learned_windows) * window
    disk_bytes, encoder = bundle_bytes(spec, export.options.recipe, len(export.graphs)), export.encoder_plan
    encoder_bytes = 0 if encoder is None else encoder.bundle_bytes
    in_memory = disk_bytes if export.options.graph_format == "tflite" else 0
    options = export.options
    room_bytes = check_ram(
        spec,
        tokens,
        window,
        in_memory,
        run.max_ram_bytes,
        generates=export.learned_windows > 0,
        quality_bytes=quality_bytes(spec) if options.check_quality else 0,
        encoder=encoder,
    )
    decoders = 2 if needs_quantized_pass(options.recipe) else 1
    # What is at a URL is not made anew: whoever goes on there needs every residual.
    every = 1 if store.is_remote else residual_every(spec, tokens, decoders, disk_bytes)
    check_disk({target: disk_bytes + encoder_bytes, store.folder: stage_bytes(spec, tokens, every) + encoder_bytes})
    return disk_bytes + encoder_bytes, room_bytes, every
