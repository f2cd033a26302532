"""What an export decides before it quantizes: the sink, and the transforms of heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint.aligned import AlignedHeads, AlignedTransforms, align
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.options import ExportOptions
from exporters.quantize.sink import FloatSink, is_sink
from exporters.quantize.survey import survey


def survey_checkpoint(
    checkpoint: Checkpoint, tokens: NDArray[np.int64], first: Sequence[int], options: ExportOptions
) -> tuple[FloatSink | None, AlignedHeads | None]:
    """The sink and the transforms of heads, as far as options and recipe ask for them.

    Args:
        checkpoint: the exact weights.
        tokens: of the calibration text, `[windows, T]`.
        first: the tokens at the start of each window.
        options: of the export.
    """
    aligned = options.recipe.heads != "none"
    if options.sink.mode == "none":
        first = ()
    if not first and not aligned:
        return None, None
    spec, context = checkpoint.spec, options.contexts[-1]
    windows = tokens if aligned else tokens[:1]
    found = survey(checkpoint, windows, context, len(first))
    has_sink = is_sink(found.outlier, options.sink, first)
    heads = None
    if aligned:
        limit = 32767 if options.kv_dtype == "s16" else 127
        heads = align(spec, found.reach, found.rows, limit, has_sink=has_sink)
    if not has_sink:
        return None, heads
    rows = found.rows
    if heads is not None:
        transforms = AlignedTransforms(spec, heads, checkpoint.tensor)
        rows = {tensor: transforms.row(tensor, each) for tensor, each in rows.items()}
    named = {tensor.past: each for tensor, each in rows.items()}
    return FloatSink(tuple(first), found.outlier, named, found.logits), heads
