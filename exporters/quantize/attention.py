"""What errors of queries and keys cost: the squared error, to first order, of what attention adds.

The output of a head at token t is the mean of the values v_s under the probabilities p_ts of the scores q_t k_s; W, the
part of o_proj that reads the head, turns it into a part of the residual. With v_t, k_t for the means at t:

- a query that moves by d moves that by W^T C^T d, C = sum_s p_ts (k_s - k_t) (v_s - v_t)^T. So directions in which no
  key differs cost nothing, and neither do differences between keys whose values are alike;
- a key that moves by d moves it by p_ts (q_t d) W^T (v_s - v_t).

Errors of different tokens are taken as independent. Several query heads read the same keys: costs add up.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import attention
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import by_inputs
from exporters.quantize.reference import Floats, NumpyOps, Weights

WINDOWS = 8
"""Windows of a text that are enough."""

_EVERY = 16  # tokens of them
_RIDGE = 1e-6  # of the trace, so that W W^T has a root


PROJECTIONS = ("q_proj", "k_proj")


def weighed_projections(spec: DecoderSpec) -> list[str]:
    """Names of the matrices whose costs `attention_costs` knows.

    In their layers queries, keys and values are products alone, and the layer owns its cache.
    """
    if spec.attention_cap is not None or spec.output_gates or spec.value_norm:
        return []
    owners = [layer for layer in spec.attention_layers if spec.owns_cache(layer) and spec.qk_norm_of(layer) is None]
    return [projection_name(layer, projection) for layer in owners for projection in PROJECTIONS]


def projection_name(layer: int, projection: str) -> str:
    """Name of a matrix of attention."""
    return f"model.layers.{layer}.self_attn.{projection}.weight"


def attention_costs(
    spec: DecoderSpec, weights: Weights, layer: int, windows: Iterable[Floats], context: int, first: int
) -> dict[str, Floats]:
    """The costs of errors of a layer's queries and keys before their rotation.

    Half of each is the mean cost for every error, as damping.

    Args:
        spec: the decoder.
        weights: its exact weights.
        layer: number of the layer; see `weighed_projections`.
        windows: inputs of the layer's projections, `[T, hidden]` each.
        context: the longest sequence that the rotary embedding is made for.
        first: the first position that counts.

    Returns:
        `[heads, D, D]` for each of `PROJECTIONS`, symmetric.
    """
    meter: _Meter | None = None
    for number, x in enumerate(windows):
        if meter is None:
            meter = _Meter(spec, weights, len(x), context, layer, first)
        meter.begin(number, np.zeros(len(x), np.int64))
        meter.head = 0
        attention(meter, spec, layer, x)
    assert meter is not None, "a text has windows"
    return dict(zip(PROJECTIONS, map(_damped, (meter.queries, meter.keys)), strict=True))


def _damped(sums: NDArray[np.float64]) -> Floats:
    means = np.trace(sums, axis1=1, axis2=2)[:, None, None] / sums.shape[1]
    damped: Floats = (sums / np.maximum(means, np.finfo(np.float32).tiny) + np.eye(sums.shape[1])).astype(np.float32)
    return damped


class _Meter(NumpyOps):
    """Attention of one layer, with sums over tokens of what errors cost.

    Attributes:
        head: the next one.
        queries: `[heads, D, D]`.
        keys: `[kv heads, D, D]`.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights, tokens: int, context: int, layer: int, first: int) -> None:
        super().__init__(spec, weights, tokens, context)
        width, kv_heads = spec.of_layer(layer).head_dim, spec.of_layer(layer).kv_heads
        self.head = 0
        self.queries, self.keys = (np.zeros((heads, width, width)) for heads in (spec.heads, kv_heads))
        self._layer = layer
        self._positions = np.arange(min(first + _EVERY // 2, tokens - 1), tokens, _EVERY)
        outputs = by_inputs(weights[projection_name(layer, "o_proj")]).reshape(spec.heads, width, -1)
        grams = outputs @ outputs.swapaxes(1, 2)
        ridge = _RIDGE * np.trace(grams, axis1=1, axis2=2)[:, None, None] + np.finfo(np.float32).tiny
        self._roots = np.linalg.cholesky(grams + ridge * np.eye(width, dtype=np.float32))
        self._scored = np.zeros((0, width), np.float32), np.zeros((0, width), np.float32)

    def scores(self, query: Floats, keys: Floats, name: str) -> Floats:
        self._scored = query, keys
        return super().scores(query, keys, name)

    def attend(self, weights: Floats, values: Floats, name: str) -> Floats:
        kv = self.head // self._spec.group(self._layer)
        reached = values @ self._roots[self.head]
        self.queries[self.head] += self._of_queries(weights[self._positions], reached)
        self.keys[kv] += self._of_keys(weights, reached)
        self.head += 1
        return super().attend(weights, values, name)

    def _of_queries(self, weights: Floats, reached: Floats) -> Floats:
        """`[D, D]`, summed over some tokens.

        Args:
            weights: the probabilities of these tokens, `[positions, T]`.
            reached: the values, of which squares are those of the residual, `[T, D]`.
        """
        _, keys = self._scored
        joint = (weights[:, :, None] * keys).swapaxes(1, 2) @ reached
        joint -= (weights @ keys)[:, :, None] * (weights @ reached)[:, None]
        turned = self._turned_back(joint).swapaxes(0, 1).reshape(keys.shape[1], -1)
        return turned @ turned.T

    def _of_keys(self, weights: Floats, reached: Floats) -> Floats:
        """`[D, D]`, summed over some tokens; arguments as above, with all rows of `weights`."""
        query, _ = self._scored
        means, some = weights @ reached, reached[self._positions]
        far = np.square(means).sum(1)[:, None] - 2 * means @ some.T + np.square(some).sum(1)
        counts = np.square(weights[:, self._positions]) * np.maximum(far, 0)
        joint = (counts.T[:, :, None] * query).swapaxes(1, 2) @ query
        turned: Floats = self._turned_back(self._turned_back(joint).swapaxes(1, 2)).sum(axis=0)
        return turned

    def _turned_back(self, columns: Floats) -> Floats:
        """Directions `[positions, D, n]` of rotated queries or keys as those before their rotation."""
        rope = self._spec.rope_of(self._layer)
        if rope is None:
            return columns
        half = rope.width // 2
        cos, sin = (table[self._positions, half:, None] for table in self.rotation(self._layer, 1))
        first, second, rest = np.split(columns, (half, 2 * half), axis=1)
        return np.concatenate([cos * first + sin * second, cos * second - sin * first, rest], axis=1)
