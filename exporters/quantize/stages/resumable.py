"""Quantization layer by layer, resuming after the last kept stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import EMBEDDING, DecoderSpec, table_key, views
from exporters.progress import Progress, one_step, silent
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import Recipe
from exporters.quantize.reference import Tensors
from exporters.quantize.stages.stage import Stage, StagedMatrices
from exporters.quantize.stages.store import StageStore
from quant import Range


def quantize_in_stages(
    tensors: Tensors,
    tokens: NDArray[np.int64],
    context: int,
    recipe: Recipe,
    store: StageStore,
    keys: Sequence[str],
    *,
    sink: int = 0,
    resume: bool = False,
    progress: Progress = silent,
) -> tuple[StagedMatrices, dict[str, Range]]:
    """Quantize every matrix, and observe the ranges of every result in the quantized decoder.

    Args:
        tensors: the exact weights.
        tokens: calibration token ids `[windows, T]`.
        context: context length for the rotary embedding.
        recipe: how each matrix is quantized.
        store: where finished stages are kept.
        keys: keys of the stages: one per layer, then the head.
        sink: number of first tokens of each window that no graph computes.
        resume: use kept stages and continue after them.
        progress: called after every layer, and after the head.
    """
    quantizer = Quantizer(tensors, tokens, context, recipe, sink)
    stages = _kept(store, keys, tensors.spec, quantizer.hidden.shape) if resume else []
    layers = tensors.spec.layers
    if 0 < len(stages) <= layers:
        quantizer.hidden = stages[-1].hidden()
        quantizer.take_ranges()
    progress("quantize", min(len(stages), layers), layers)
    for layer in range(len(stages), layers):
        matrices = dict(quantizer.layer(layer))
        stages.append(store.write(keys[layer], matrices, quantizer.take_ranges(), quantizer.hidden))
        progress("quantize", layer + 1, layers)
    if len(stages) == layers:
        with one_step("quantize head", progress):
            matrices = dict(quantizer.head())
            stages.append(store.write(keys[layers], matrices, quantizer.take_ranges(), None))
    return StagedMatrices(stages), {name: seen for stage in stages for name, seen in stage.ranges().items()}


def _kept(store: StageStore, keys: Sequence[str], spec: DecoderSpec, hidden: tuple[int, ...]) -> list[Stage]:
    """The kept stages before the first that is missing or damaged."""
    matrices: list[dict[str, tuple[int, int]]] = [{} for _ in keys]
    for view in views(spec):
        if view.is_matrix and view.name not in (EMBEDDING, table_key(spec)):
            outputs, inputs = view.shape
            matrices[spec.layers if view.layer is None else view.layer][view.name] = inputs, outputs
    found: list[Stage] = []
    for number, key in enumerate(keys):
        stage = store.find(key)
        if stage is None or not stage.fits(matrices[number], hidden if number < spec.layers else None):
            break
        found.append(stage)
    return found
