"""The sink of a bundle with an adapter: its tokens are computed here, since no graph computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine import read_sink
from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import LOGITS
from edgekv.spec.tensors import by_outputs
from exporters.lora.base import LoraBase
from exporters.quantize.reference import NO_CHANGES, Changes, Floats, NumpyOps, Observer, Weights


def adapted_sink(bundle: Bundle, base: LoraBase, changes: Changes) -> dict[str, NDArray[Any]]:
    """Integers of the sink's rows and logits with an adapter, as in the sink's file; nothing without a sink.

    The bundle's own rows come from the exact weights. Its quantized weights give the difference that the adapter makes.

    Args:
        bundle: the bundle.
        base: its base model.
        changes: what the adapter adds.
    """
    encodings = bundle.manifest.encodings
    return {name: encodings[name].quantize(values) for name, values in exact_sink(bundle, base, changes).items()}


def exact_sink(bundle: Bundle, base: LoraBase, changes: Changes) -> dict[str, Floats]:
    """As `adapted_sink`, before values are rounded."""
    sink = read_sink(bundle)
    if sink is None:
        return {}
    plain, adapted = (_run(bundle, base, changed) for changed in (NO_CHANGES, changes))
    encodings = bundle.manifest.encodings
    integers = {**sink.rows, LOGITS: sink.logits}
    return {name: encodings[name].dequantize(rows) + adapted[name] - plain[name] for name, rows in integers.items()}


def _run(bundle: Bundle, base: LoraBase, changes: Changes) -> dict[str, Floats]:
    """Keys, values and logits of the sink, by the names of its file."""
    rows: dict[str, Floats] = {}
    manifest = bundle.manifest
    cached = {tensor.past for tensor in manifest.interface.tensors(range(manifest.model.layers))}

    def observe(name: str, value: Floats) -> None:
        if name in cached:
            rows[name] = value

    hidden = base.sink_embedding
    assert hidden is not None, "a bundle with a sink has its embeddings"
    ops = _AdaptedOps(bundle, base, changes, len(hidden), observe)
    for layer in range(base.spec.layers):
        hidden = decoder_layer(ops, base.spec, layer, hidden)
    rows[LOGITS] = logits(ops, base.spec, hidden)
    return rows


class _AdaptedOps(NumpyOps):
    """Runs the dequantized matrices of a bundle, and an adapter beside them."""

    def __init__(self, bundle: Bundle, base: LoraBase, changes: Changes, tokens: int, observe: Observer) -> None:
        super().__init__(base.spec, _SmallTensors(base), tokens, bundle.manifest.context, observe, changes)
        self._stored = bundle.weights()
        self._held: dict[str, Floats] = {}

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        if weight not in self._held:  # stored with its gain; heads ask for one matrix one after another
            self._held = {weight: by_outputs(self._stored.matrix(weight).dequantize())}
        product: Floats = x @ self._held[weight][rows].T
        return product


class _SmallTensors(Weights):
    """Norms and biases of a bundle."""

    def __init__(self, base: LoraBase) -> None:
        self._base = base

    def __getitem__(self, key: str) -> Floats:
        return np.asarray(self._base.folded(key))
