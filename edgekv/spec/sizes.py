"""Bytes of a decoder's weights in a bundle: embedding table, layers and head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgekv.spec.linear import DeltaRule
from quant import WEIGHT_TYPES, WeightDtype, WeightType


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder whose matrices are exactly q, k, v, o, gate, up and down, with a separate head.

    Layers with a short convolution have three projections of its input and one of its output in place of q, k, v and o.

    Attributes:
        layers: number of layers.
        hidden: width of the residual.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: D.
        intermediate: width of the feed-forward.
        vocab: rows of the embedding table.
        tied_head: whether the head is the embedding table; a bundle stores it once.
        convolutions: number of layers with a short convolution in place of attention.
        head_gates: whether layers with attention have a matrix for gates of heads.
        output_gates: whether it has a gate for every channel.
        delta_rule: the layers with a gated delta rule in place of attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_head: bool = False
    convolutions: int = 0
    head_gates: bool = False
    output_gates: bool = False
    delta_rule: DeltaRule | None = None

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """`[in, out]` of the matrices of a layer with attention: q, k, v, o, gate, up, down, and gates of heads."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
        gates = ((hidden, self.heads),) if self.head_gates else ((hidden, queries),) if self.output_gates else ()
        return (*attention, (hidden, inner), (hidden, inner), (inner, hidden), *gates)

    @property
    def convolution_matrices(self) -> tuple[tuple[int, int], ...]:
        """`[in, out]` of the matrices of a layer with a convolution: its three inputs, its output, gate, up, down."""
        hidden, inner = self.hidden, self.intermediate
        return (*((hidden, hidden),) * 4, (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def delta_matrices(self) -> tuple[tuple[int, int], ...]:
        """`[in, out]` of the matrices of a layer with a delta rule: strengths, decays, q|k|v, gates, and the others."""
        rule, hidden, inner = self.delta_rule, self.hidden, self.intermediate
        if rule is None:
            return ()
        inputs = tuple((hidden, width) for width in (rule.value_heads, rule.value_heads, rule.channels, rule.values))
        return (*inputs, (rule.values, hidden), (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def kinds(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Number of layers and matrices of layers with attention, with a convolution, and with a delta rule."""
        deltas = 0 if self.delta_rule is None else len(self.delta_rule.layers)
        attending = self.layers - self.convolutions - deltas
        convolutions = self.convolutions, self.convolution_matrices
        return (attending, self.layer_matrices), convolutions, (deltas, self.delta_matrices)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of the largest layer."""
        return max(_elements(matrices) for layers, matrices in self.kinds if layers)

    @property
    def all_layer_parameters(self) -> int:
        """Elements of the matrices of all layers."""
        return sum(layers * _elements(matrices) for layers, matrices in self.kinds)

    @property
    def table_parameters(self) -> int:
        """Elements of the embedding table, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all matrices; a tied head counts once."""
        return self.all_layer_parameters + (1 if self.tied_head else 2) * self.table_parameters


def _elements(matrices: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights, without the headers of their files.

    Attributes:
        embedding_bytes: the table.
        layer_bytes: one layer, or the mean of several kinds.
        layer_packed_bytes: bytes of one layer that contain two 4-bit integers.
        layers: number of layers.
        head_bytes: the last norm and the head.
        shares_table: whether the table is the head's matrix, stored once.
    """

    embedding_bytes: int
    layer_bytes: int
    layer_packed_bytes: int
    layers: int
    head_bytes: int
    shares_table: bool = False

    @property
    def total_bytes(self) -> int:
        """Of all that is stored."""
        return self.compiled_bytes - self.embedding_bytes * self.shares_table

    @property
    def compiled_bytes(self) -> int:
        """Of all that a graph which looks up embeddings holds: the compiler stores a shared table twice."""
        return self.embedding_bytes + self.layers * self.layer_bytes + self.head_bytes


@dataclass(frozen=True, slots=True)
class LayerTypes:
    """Weight types of a layer's matrices in a shipped recipe.

    Attributes:
        dtype: of most matrices.
        int8: places of those in int8, in the order of `Decoder.layer_matrices`; the gates of heads are too, and the
            four matrices of a convolution.
    """

    dtype: WeightDtype
    int8: frozenset[int]

    def type_at(self, place: int) -> WeightType:
        """The type of one matrix of a layer with attention."""
        return WEIGHT_TYPES["int8" if place in self.int8 or place >= _GATES else self.dtype]

    def convolution_type_at(self, place: int) -> WeightType:
        """The type of one matrix of a layer with a convolution."""
        return WEIGHT_TYPES["int8"] if place < _FEED_FORWARD else self.type_at(place)

    def delta_type_at(self, place: int) -> WeightType:
        """The type of one matrix of a layer with a delta rule."""
        return WEIGHT_TYPES["int8" if place < _DELTA_MATRICES else self.dtype]


_DELTA_MATRICES = 2  # of strengths and decays
_FEED_FORWARD, _GATES = 4, 7  # first places
_KEYS_AND_VALUES = frozenset({1, 2})
_UP_AND_DOWN = frozenset({5, 6})
RECIPE_TYPES = {each.recipe: LayerTypes(name, _KEYS_AND_VALUES) for name, each in WEIGHT_TYPES.items()} | {
    "w4a16-lpbq32-updown8": LayerTypes("lpbq32", _KEYS_AND_VALUES | _UP_AND_DOWN)
}
"""Weight types of the layers in the shipped recipes, by name; the head is int8."""


def recipe_weights(decoder: Decoder, recipe: str) -> Weights:
    """The weights in one of the recipes of `RECIPE_TYPES`.

    One byte for each element of a matrix, or half a byte; four for the scale of each of its output channels, and one
    for each of their blocks; one for each element of the embedding table, and six for each of its rows; two for each
    element of a norm. A tied head is the table, and a matrix in front of it turns what it reads. Biases, q and k norms
    and post-norms are not counted.
    """
    types = RECIPE_TYPES[recipe]
    types_at = types.type_at, types.convolution_type_at, types.delta_type_at
    all_bytes = packed_bytes = 0
    for (layers, matrices), type_at in zip(decoder.kinds, types_at, strict=True):
        for place, (rows, columns) in enumerate(matrices):
            all_bytes += layers * type_at(place).matrix_bytes(rows, columns)
            packed_bytes += layers * type_at(place).packed_bytes(rows, columns)
    byte = WEIGHT_TYPES["int8"]
    table_bytes, step_bytes = byte.matrix_bytes(decoder.hidden, decoder.vocab), 2 * decoder.vocab
    turn_bytes = byte.matrix_bytes(decoder.hidden, decoder.hidden) + step_bytes if decoder.tied_head else 0
    return Weights(
        embedding_bytes=table_bytes + step_bytes,
        layer_bytes=-(-all_bytes // decoder.layers) + 2 * 2 * decoder.hidden,
        layer_packed_bytes=-(-packed_bytes // decoder.layers),
        layers=decoder.layers,
        head_bytes=table_bytes + turn_bytes + 2 * decoder.hidden,
        shares_table=decoder.tied_head,
    )
