"""From a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from edgekv.bundle import Manifest, check_output
from exporters.allocate import allocated, decode_speed
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import open_store
from exporters.htp.compile import Watch, unwatched
from exporters.options import ExportOptions, RunOptions
from exporters.pipeline.assemble import assemble
from exporters.pipeline.inputs import Exact, Inputs
from exporters.pipeline.piece import Plan
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
    check_output(target, force=force)
    check_compiler(options)
    if options.allocates and options.graph_format == "onnx":
        options = replace(options, recipe=options.recipe.for_blocks())
    with one_step("prepare", progress):
        prepared = prepare(checkpoint, options)
    store = open_store(run)
    disk_bytes = _check_resources(prepared, target, store, run)
    identity = Identity.of(checkpoint, partial(progress, "hash weights"))
    planner = Planner(identity)
    remember(checkpoint, identity)
    work = _Work(checkpoint, planner.plan, identity, run, store, progress, 2 * disk_bytes)
    if options.allocates:
        speed = None if options.target_tokens_per_s is None else decode_speed(prepared, run, progress)
        prepared = allocated(checkpoint, options, prepared, planner, work.finished, speed)
    exported = planner.export(prepared)

    def sealed() -> Manifest:
        with full_disk_named(target, "the bundle", disk_bytes), one_step("seal", progress):
            allow = options.allow_float
            return assemble(exported, options.device, store, target, force=force, allow_float=allow, watch=watch)

    manifest = work.finished(prepared, exported.folded.exact, exported.names, lambda _: sealed())
    if run.removes_pieces:
        store.remove([*planner.plan.pieces, *planner.plan.given])
    return manifest


@dataclass(slots=True)
class _Work:
    """Makes pieces of exports of one checkpoint.

    Attributes:
        checkpoint: the checkpoint.
        plan: the pieces.
        identity: of the checkpoint.
        run: where pieces run.
        store: where they are kept.
        progress: called for each step.
        disk_bytes: space that workers need.
    """

    checkpoint: Checkpoint
    plan: Plan
    identity: Identity
    run: RunOptions
    store: PieceStore
    progress: Progress
    disk_bytes: int
    _inputs: Inputs = field(init=False)
    _resumes: bool = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = Inputs(self.store, Place.of(self.checkpoint), self.progress, keeps_files=True)
        self._resumes = self.run.resume

    def finished(self, prepared: Prepared, exact: Exact, names: Sequence[str], read: Callable[[PieceStore], T]) -> T:
        """Make pieces, and read what is wanted of them.

        Both are repeated if another export removes pieces that it shares.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self._make(prepared, exact, names)
                return read(self.store)
            except (MissingPieceError, FileNotFoundError):
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _make(self, prepared: Prepared, exact: Exact, names: Sequence[str]) -> None:
        self._inputs.take(exact, self.checkpoint, prepared.checkpoint)
        resumes, self._resumes = self._resumes, True
        if self.run.cluster is None:
            run_serial(self.plan, names, self._inputs, self.progress, resume=resumes)
            return
        from exporters.pipeline.dask.run import run_on  # its packages are optional

        cluster, place, most = self.run.cluster, Place.of(self.checkpoint), self.disk_bytes
        run_on(cluster, self.plan, names, self.store, place, self.identity, self.progress, disk_bytes=most)


def _check_resources(prepared: Prepared, target: Path, store: PieceStore, run: RunOptions) -> int:
    """Refuse an export that needs more RAM or disk space than there is; returns the size of its bundle.

    Raises:
        UsageError: more RAM is needed than allowed.
        BundleError: a disk has not enough space.
    """
    spec = prepared.checkpoint.spec
    windows, window = prepared.survey_tokens.shape
    tokens = (windows + prepared.learned_windows) * window
    disk_bytes, encoder = bundle_bytes(spec, prepared.options.recipe, len(prepared.graphs)), prepared.encoder_plan
    encoder_bytes = 0 if encoder is None else encoder.bundle_bytes
    in_memory = disk_bytes if prepared.options.graph_format == "tflite" else 0
    options = prepared.options
    check_ram(
        spec,
        tokens,
        window,
        in_memory,
        run.max_ram_bytes,
        generates=prepared.learned_windows > 0,
        quality_bytes=quality_bytes(spec) if options.check_quality else 0,
        encoder=encoder,
    )
    check_disk({target: disk_bytes + encoder_bytes, store.folder: stage_bytes(spec, tokens) + encoder_bytes})
    return disk_bytes + encoder_bytes
