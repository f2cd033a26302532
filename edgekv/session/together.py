"""Generations that share passes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from edgekv.session.batch import Batch
from edgekv.session.caches import CacheSetup
from edgekv.session.generation import Generation
from edgekv.session.graphs import Graphs, StepTimes
from edgekv.session.refusal import refuse


def make_batch(graphs: Graphs, caches: CacheSetup) -> Batch:
    """What a model needs for `advance_together`.

    Raises:
        UsageError: the bundle or the engine cannot run several sequences in one pass.
        EngineError: the engine refused the verify graph.
    """
    manifest, fix = caches.manifest, "Leave it out; requests take turns then."
    if manifest.graph("verify") is None:
        refuse("batch", "a bundle without verify graphs", "verify graphs", "Export it with --verify 8.")
    if graphs.row_bits != "equal":
        found = "an engine whose sums depend on the columns of tokens"
        refuse("batch", found, "one that gives a token the same bits beside any others, such as htp", fix)
    if len(manifest.cache_geometry.groups()) > 1 or caches.growth is not None:
        found = "a cache that grows" if caches.growth is not None else "layers with attention windows"
        refuse("batch", found, "layers that attend to the whole context, in memory of one size", fix)
    if manifest.cache_geometry.key_layout == "columns":
        refuse("batch", "keys as columns", "keys as rows", "Export with --key-layout rows.")
    return Batch(graphs, caches.make_window())


def advance_together(generations: Sequence[Generation], batch: Batch, graphs: Graphs) -> None:
    """Run the next pass of several generations as one, as far as they can; `next` of each then needs none.

    The caller has the model's lock.

    Args:
        generations: of the model, each once.
        batch: runs the passes.
        graphs: of the model, for the times.

    Raises:
        ValueError: a later call has claimed the sequence of one.
        EngineError: the runtime failed; the generations of that pass have not changed.
    """
    ready = [(each, offer) for each in generations if (offer := each.offer()) is not None]
    for at in range(0, len(ready), batch.most):
        some = ready[at : at + batch.most]
        if len(some) == 1:
            return  # a step of its own reads less
        started, times = perf_counter_ns(), graphs.times
        before = [offer.session.cache.stats for _, offer in some]
        rows = batch.advance([offer for _, offer in some])
        spent, ns, count = graphs.times - times, perf_counter_ns() - started, sum(row is not None for row in rows)
        for (generation, offer), stats, row in zip(some, before, rows, strict=True):
            if row is not None:
                share = StepTimes(1, spent.run_ns // count, spent.host_ns // count)
                generation.receive(offer, row, stats, share, ns)
