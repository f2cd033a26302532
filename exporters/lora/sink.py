"""The sink of a bundle with an adapter: its tokens are computed here, since no graph computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine import read_sink
from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import EMBEDDING, LOGITS, DecoderInterface, DecoderSpec, KvTensor, LoraTarget
from edgekv.spec.tensors import by_outputs
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import Factors
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.lora.base import ExportedBase, LoraBase
from exporters.lora.quantize import folded_factors
from exporters.quantize.reference import Floats, NumpyOps, Observer, Weights

Changes = Mapping[tuple[int, LoraTarget], Factors]


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
    plain, adapted = (_run(bundle, base, each) for each in ({}, changes))
    encodings = bundle.manifest.encodings
    integers = {**sink.rows, LOGITS: sink.logits}
    return {name: encodings[name].dequantize(rows) + adapted[name] - plain[name] for name, rows in integers.items()}


def adapted_rows(
    checkpoint: Checkpoint, tokens: Sequence[int], choices: Sequence[AdapterChoice], context: int
) -> list[dict[KvTensor, Floats]]:
    """Keys and values of the first tokens with each of some adapters, by the exact weights, `[n, D]`.

    Args:
        checkpoint: the base model, before transforms that the export folds into it.
        tokens: ids.
        choices: the adapters.
        context: the context length of the rotary embedding.

    Raises:
        CheckpointError: an adapter is damaged, or of another model.
    """
    spec, weights, base = checkpoint.spec, Weights(checkpoint), ExportedBase(checkpoint, checkpoint)
    found: list[dict[str, Floats]] = [{} for _ in choices]
    ops = [
        _Adapting(spec, weights, folded_factors(Adapter.open(choice), base), len(tokens), context, seen.__setitem__)
        for choice, seen in zip(choices, found, strict=True)
    ]
    states = [checkpoint.tensor(EMBEDDING, np.array(tokens))] * len(ops)
    for layer in range(spec.layers):
        weights.drop()
        states = [decoder_layer(each, spec, layer, state) for each, state in zip(ops, states, strict=True)]
    kept = [*DecoderInterface.of(spec, context, "u8", "rows", "u16").tensors(range(spec.layers))]
    return [{tensor: seen[tensor.past] for tensor in kept} for seen in found]


def _run(bundle: Bundle, base: LoraBase, changes: Changes) -> dict[str, Floats]:
    """Keys, values and logits of the sink, by the names of its file."""
    found: dict[str, Floats] = {}
    manifest = bundle.manifest
    cached = {tensor.past for tensor in manifest.interface.tensors(range(manifest.model.layers))}

    def observe(name: str, value: Floats) -> None:
        if name in cached:
            found[name] = value

    hidden = base.sink_embedding
    assert hidden is not None, "a bundle with a sink has its embeddings"
    ops = _AdaptedOps(bundle, base, changes, len(hidden), observe)
    for layer in range(base.spec.layers):
        hidden = decoder_layer(ops, base.spec, layer, hidden)
    found[LOGITS] = logits(ops, base.spec, hidden)
    return found


class _Adapting(NumpyOps):
    """Runs an adapter beside the matrices."""

    def __init__(
        self, spec: DecoderSpec, weights: Weights, changes: Changes, tokens: int, context: int, observe: Observer
    ) -> None:
        super().__init__(spec, weights, tokens, context, observe)
        self._changes = changes

    def adapt(
        self, y: Floats, x: Floats, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Floats:
        change = self._changes.get((layer, target))
        if change is None:
            return y
        width = self._spec.head_dim
        rows = slice(None) if head is None else slice(head * width, (head + 1) * width)
        added: Floats = y + (x @ change.right.T) @ change.left[rows].T
        return added


class _AdaptedOps(_Adapting):
    """Runs the dequantized matrices of a bundle, and an adapter beside them."""

    def __init__(self, bundle: Bundle, base: LoraBase, changes: Changes, tokens: int, observe: Observer) -> None:
        super().__init__(base.spec, _SmallTensors(base), changes, tokens, bundle.manifest.context, observe)
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
