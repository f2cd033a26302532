"""The head of a bundle's ONNX graphs on numpy, some rows of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgekv.bundle import Bundle, BundleWeights
from edgekv.engine.sink import read_sink
from edgekv.graphs.decoder import head_inputs, head_logits
from edgekv.spec import HEAD, HEAD_BIAS, LOGITS
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import by_outputs
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.fold import EVERY, Rows
from exporters.quantize.reference import Floats, NumpyOps, Weights
from quant import QuantizedWeight


class BundleHead:
    """The last norm and the head as the HTP computes them: integers come in, and every result is rounded.

    ONNX Runtime would hold the whole matrix as floats, and hold it twice while it loads.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Read the places of weights; the bundle has ONNX graphs."""
        self._bundle = bundle

    def blocks(self, states: Sequence[Floats]) -> Iterator[list[Floats]]:
        """The logits `[T, rows]` of each window, for some rows of the vocabulary after the others.

        Args:
            states: outputs `[T - first, hidden]` of the last layer, as its graph gives them, from position `first` on,
                behind the sink.
        """
        spec, context, weights = self._bundle.manifest.model, self._bundle.manifest.context, self._bundle.weights()
        tensors, head, sink = _BundleTensors(spec, weights), weights.matrix(HEAD), read_sink(self._bundle)
        known = Weights(tensors)
        encoding = self._bundle.manifest.encodings[LOGITS]
        before = None if sink is None else encoding.dequantize(sink.logits)
        ops = {n: _RoundedOps(self._bundle, known, n, context) for n in {len(state) for state in states}}
        inputs = [head_inputs(ops[len(state)], spec, state) for state in states]
        for rows in blocks_of_rows(spec.result_width):
            known.put(HEAD, by_outputs(head.columns(rows.start, rows.stop).dequantize()))
            if "lm_head" in spec.biased:
                known.put(HEAD_BIAS, tensors.tensor(HEAD_BIAS, rows))
            logits = [head_logits(ops[len(x)], spec, x) for x in inputs]
            yield logits if before is None else [np.concatenate([before[:, rows], block]) for block in logits]


class _BundleTensors:
    """The weights of a bundle as floats; `Tensors`."""

    def __init__(self, spec: DecoderSpec, weights: BundleWeights) -> None:
        self.spec = spec
        self._weights = weights

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """Some rows of a tensor; matrices are `[out, in]`, with all gains in them."""
        if key in self._weights.places.matrices:
            return by_outputs(self._weights.matrix(key).dequantize())[rows]
        return self._weights.places.tensors[key].encoding.dequantize(self._weights.tensor(key))[rows]

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """Some output channels of a matrix."""
        weight = self._weights.matrix(key)
        start, stop, _ = rows.indices(weight.integers.shape[1])
        return weight.columns(start, stop)


class _RoundedOps(NumpyOps):
    """The decoder on a bundle's weights, whose results have the values of their encodings."""

    def __init__(self, bundle: Bundle, weights: Weights, tokens: int, context: int) -> None:
        super().__init__(bundle.manifest.model, weights, tokens, context)
        self._encodings = bundle.manifest.encodings

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        return super().product(x, weight, rows, 1.0)  # the stored scales have the gain

    def _seen(self, name: str, value: Floats) -> Floats:
        encoding = self._encodings[name]
        return encoding.dequantize(encoding.quantize(value))
