"""The values that results reach with an adapter: slots are calibrated on them as on those of the base model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import EMBEDDING, HEAD, LoraTarget, by_inputs, lora_group, lora_reach
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.matrices import PairedOps
from exporters.quantize.reference import Changes, Floats, NumpyOps
from quant import Range


def adapted_ranges(
    tensors: Tensors,
    changes: Changes,
    tokens: NDArray[Any],
    context: int,
    sink: int,
    progress: Callable[[int, int], None],
) -> dict[str, Range]:
    """The ranges of all results of the exact decoder with an adapter, one layer in memory at a time.

    Args:
        tensors: the weights, with what a recipe folds into them.
        changes: what the adapter adds to them.
        tokens: ids of the calibration text `[windows, T]`.
        context: the longest sequence that the rotary embedding is made for.
        sink: number of first tokens of each window that no graph computes.
        progress: called with the number of layers done, and of all.
    """
    spec, ops = tensors.spec, _AdaptedOps(tensors, changes, tokens.shape[1], context, sink)
    hidden = tensors.tensor(EMBEDDING, tokens.reshape(-1)).reshape(*tokens.shape, -1)
    for layer in range(spec.layers):
        progress(layer, spec.layers)
        for window, ids in enumerate(tokens):
            ops.begin(window, ids)
            hidden[window] = decoder_layer(ops, spec, layer, hidden[window : window + 1])[0]
        ops.drop()
    for rows in blocks_of_rows(spec.result_width):
        ops.head = tensors.tensor(HEAD, rows)
        for window in range(len(hidden)):
            logits(ops, spec, hidden[window : window + 1])
    progress(spec.layers, spec.layers)
    return ops.take_ranges()


class _AdaptedOps(PairedOps):
    """Observes the exact decoder, `[1, T, width]`, with an adapter beside its matrices.

    Attributes:
        head: some rows of the head.
    """

    head: Floats

    def __init__(self, tensors: Tensors, changes: Changes, tokens: int, context: int, sink: int) -> None:
        super().__init__(tensors, tokens, context, sink, decoders=1, changes=changes)

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        if weight != HEAD:
            return NumpyOps.product(self, x, weight, rows, gain)
        product: Floats = x @ by_inputs(self.head) * np.float32(gain)
        return product

    def adapt(
        self, y: Floats, x: Floats, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Floats:
        self.observe_lengths(lora_reach(layer, lora_group(target)), [x])
        return super().adapt(y, x, layer, target, name, head=head)
