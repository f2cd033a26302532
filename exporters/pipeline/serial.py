"""Does pieces one after another in this process: one layer in memory, several compilers at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from edgekv.machine.system import return_freed_memory
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.parallel import Job, side_by_side
from exporters.pipeline.piece import Plan, PlannedPiece
from exporters.pipeline.store import MissingPieceError, PieceRecord
from exporters.progress import Progress

_TOLD = {
    "layer": "quantize",
    "head": "quantize head",
    "target": "run target",
    "check": "check on HTP",
    "compile": "compile",
    "estimate": "estimate",
}
"""Progress of kinds of pieces; the others tell of their own steps."""

_ATTEMPTS = 3


def run_serial(plan: Plan, targets: Sequence[str], inputs: Inputs, progress: Progress, *, resume: bool) -> None:
    """Do all that these targets need.

    Args:
        plan: the pieces.
        targets: names of the last ones.
        inputs: what they read.
        progress: called for each piece.
        resume: take what is finished; otherwise everything is done anew.

    Raises:
        EdgeKVError: a piece failed; those before it are finished.
    """
    store, ancestors = inputs.store, plan.ancestors(targets)
    inputs.residual_every = plan.residual_every
    for name, write in plan.sources.items():
        if name not in inputs.adopted:
            store.make(name, "given", write)
    unfinished = {name: planned for name, planned in plan.pieces.items() if name in ancestors}
    if resume:
        unfinished = plan.unfinished(store, targets)
    for attempt in range(_ATTEMPTS):
        try:
            _run(plan, ancestors, unfinished, inputs, progress, resume=resume or attempt > 0)
            return
        except MissingPieceError:  # somebody has cleared the store meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
            unfinished = plan.unfinished(store, targets)


def _run(
    plan: Plan,
    ancestors: set[str],
    unfinished: Mapping[str, PlannedPiece],
    inputs: Inputs,
    progress: Progress,
    *,
    resume: bool,
) -> None:
    def do(name: str) -> PieceRecord:
        piece = unfinished[name].piece
        record = inputs.store.make(name, piece.kind, partial(piece.make, inputs=inputs), anew=not resume)
        return_freed_memory()  # arrays below a megabyte, as experts have, would stay with the C library
        return record

    totals = Counter(plan.kinds(ancestors))
    done = totals - Counter(plan.kinds(unfinished))
    for (kind, in_child), names in _groups(unfinished):
        if in_child:
            jobs = [Job(partial(do, name), unfinished[name].ram_bytes) for name in names]
            for _ in side_by_side(jobs, _TOLD[kind], progress):
                pass
            continue
        stage = _TOLD.get(kind)
        if stage is not None:
            progress(stage, done[kind], totals[kind])
        for name in names:
            do(name)
            done[kind] += 1
            if stage is not None:
                progress(stage, done[kind], totals[kind])


def _groups(unfinished: Mapping[str, PlannedPiece]) -> Iterator[tuple[tuple[str, bool], list[str]]]:
    """Names of pieces of one kind that follow each other."""
    for key, names in groupby(unfinished, lambda name: (unfinished[name].piece.kind, unfinished[name].piece.in_child)):
        yield key, [*names]
