"""Bytes of a decoder's weights in a bundle: embedding table, layers and head."""

from __future__ import annotations

from dataclasses import dataclass

from quant import WEIGHT_TYPES, WeightDtype, WeightType


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder whose matrices are exactly q, k, v, o, gate, up and down, with a separate head.

    Attributes:
        layers: number of layers.
        hidden: width of the residual.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: D.
        intermediate: width of the feed-forward.
        vocab: rows of the embedding table.
        tied_head: whether the head is the embedding table; a bundle stores it once.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_head: bool = False

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """`[in, out]` of a layer's matrices: q, k, v, o, gate, up, down."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
        return (*attention, (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def layer_parameters(self) -> int:
        """Elements of a layer's matrices."""
        return sum(rows * columns for rows, columns in self.layer_matrices)

    @property
    def table_parameters(self) -> int:
        """Elements of the embedding table, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all matrices; a tied head counts once."""
        return self.layers * self.layer_parameters + (1 if self.tied_head else 2) * self.table_parameters


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights, without the headers of their files.

    Attributes:
        embedding_bytes: the table.
        layer_bytes: one layer.
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
        int8: places of those in int8, in the order of `Decoder.layer_matrices`.
    """

    dtype: WeightDtype
    int8: frozenset[int]

    def type_at(self, place: int) -> WeightType:
        """The type of one matrix."""
        return WEIGHT_TYPES["int8" if place in self.int8 else self.dtype]


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
    layer_bytes = packed_bytes = 0
    for place, (rows, columns) in enumerate(decoder.layer_matrices):
        kind = types.type_at(place)
        layer_bytes += kind.matrix_bytes(rows, columns)
        packed_bytes += kind.packed_bytes(rows, columns)
    byte = WEIGHT_TYPES["int8"]
    table_bytes, step_bytes = byte.matrix_bytes(decoder.hidden, decoder.vocab), 2 * decoder.vocab
    turn_bytes = byte.matrix_bytes(decoder.hidden, decoder.hidden) + step_bytes if decoder.tied_head else 0
    return Weights(
        embedding_bytes=table_bytes + step_bytes,
        layer_bytes=layer_bytes + 2 * 2 * decoder.hidden,
        layer_packed_bytes=packed_bytes,
        layers=decoder.layers,
        head_bytes=table_bytes + turn_bytes + 2 * decoder.hidden,
        shares_table=decoder.tied_head,
    )
