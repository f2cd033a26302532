"""Generations that share passes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.batch import Batch, Offer
from edgekv.engine.generation import Generation
from edgekv.engine.graphs import Graphs, StepTimes


def advance_together(generations: Sequence[Generation], batch: Batch, graphs: Graphs) -> None:
    """Run the next pass of several generations as one, as far as they can; `next` of each then needs none.

    A pass has one adapter, so those with the same share passes. The caller has the model's lock.

    Args:
        generations: of the model, each once.
        batch: runs the passes.
        graphs: of the model, for the times.

    Raises:
        ValueError: a later call has claimed the sequence of one.
        EngineError: the runtime failed; the generations of that pass have not changed.
    """
    ready: dict[BoundAdapter | None, list[tuple[Generation, Offer]]] = {}
    for each in generations:
        if (offer := each.offer()) is not None:
            ready.setdefault(offer.session.adapter, []).append((each, offer))
    passes = [alike[at : at + batch.most] for alike in ready.values() for at in range(0, len(alike), batch.most)]
    for some in passes:
        if len(some) == 1:
            continue  # a step of its own reads less
        started, times = perf_counter_ns(), graphs.times
        before = [offer.session.cache.stats for _, offer in some]
        rows = batch.advance([offer for _, offer in some])
        spent, ns, count = graphs.times - times, perf_counter_ns() - started, sum(row is not None for row in rows)
        for (generation, offer), stats, row in zip(some, before, rows, strict=True):
            if row is not None:
                share = StepTimes(1, spent.run_ns // count, spent.host_ns // count)
                generation.receive(offer, row, stats, share, ns)
