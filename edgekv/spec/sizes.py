"""Bytes of a decoder's weights in a bundle: embedding table, layers and head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgekv.spec.linear import DeltaRule
from quant import WEIGHT_TYPES, WeightDtype, WeightType

MatrixRole = Literal[
    "q",
    "k",
    "v",
    "o",
    "head_gate",
    "conv_in",
    "conv_out",
    "delta_rates",
    "delta_in",
    "delta_out",
    "gate",
    "up",
    "down",
    "router",
    "layer_gate",
    "layer_out",
]


class LayerMatrix(NamedTuple):
    """A matrix of a layer."""

    role: MatrixRole
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Its elements."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with the same matrices.

    Attributes:
        numbers: of the layers, ascending.
        matrices: of one of them.
    """

    numbers: tuple[int, ...]
    matrices: tuple[LayerMatrix, ...]

    @property
    def layers(self) -> int:
        """Their number."""
        return len(self.numbers)

    @property
    def parameters(self) -> int:
        """Elements of the matrices of one layer."""
        return sum(matrix.parameters for matrix in self.matrices)


def attention_matrices(
    hidden: int, queries: int, keys: int, *, owns_cache: bool = True, gates: int = 0
) -> tuple[LayerMatrix, ...]:
    """q, k, v, o, and gates of heads; a layer that reads another one's cache has no k and v.

    Args:
        hidden: width of the residual.
        queries: width of all query heads.
        keys: width of all key heads.
        owns_cache: whether keys and values are the layer's own.
        gates: number of gates, of heads or of their channels.
    """
    own = (LayerMatrix("k", hidden, keys), LayerMatrix("v", hidden, keys)) if owns_cache else ()
    gated = (LayerMatrix("head_gate", hidden, gates),) if gates else ()
    return (LayerMatrix("q", hidden, queries), *own, LayerMatrix("o", queries, hidden), *gated)


def convolution_matrices(hidden: int) -> tuple[LayerMatrix, ...]:
    """The three inputs of a short convolution, and its output."""
    return (*(LayerMatrix("conv_in", hidden, hidden),) * 3, LayerMatrix("conv_out", hidden, hidden))


def delta_matrices(hidden: int, rule: DeltaRule) -> tuple[LayerMatrix, ...]:
    """Strengths, which Mamba-2 has not, and decays, q|k|v, gates, and the output of a gated delta rule."""
    rates = (LayerMatrix("delta_rates", hidden, rule.value_heads),) * (2 if rule.corrects else 1)
    inputs = LayerMatrix("delta_in", hidden, rule.channels), LayerMatrix("delta_in", hidden, rule.values)
    return (*rates, *inputs, LayerMatrix("delta_out", rule.values, hidden))


def feed_forward_matrices(hidden: int, inner: int, *, gated: bool = True) -> tuple[LayerMatrix, ...]:
    """gate, if there is one, up and down."""
    gates = (LayerMatrix("gate", hidden, inner),) if gated else ()
    return (*gates, LayerMatrix("up", hidden, inner), LayerMatrix("down", inner, hidden))


def expert_matrices(hidden: int, inner: int, experts: int) -> tuple[LayerMatrix, ...]:
    """The router, and gate, up and down of each expert."""
    return (LayerMatrix("router", hidden, experts), *feed_forward_matrices(hidden, inner) * experts)


def layer_input_matrices(hidden: int, width: int) -> tuple[LayerMatrix, ...]:
    """The gate of what the host gathers for a layer, and its projection; none without such an input."""
    return (LayerMatrix("layer_gate", hidden, width), LayerMatrix("layer_out", width, hidden)) if width else ()


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder with a separate head.

    Attributes:
        layers: number of layers.
        hidden: width of the residual.
        heads: query heads.
        kv_heads: key/value heads; where layers differ, the most, and so for the next two.
        head_dim: D.
        intermediate: width of the feed-forward, of all experts together.
        vocab: rows of the embedding table.
        tied_head: whether the head is the embedding table; a bundle stores it once.
        kinds: the matrices of the layers; empty if all have q, k, v, o, gate, up and down, of these sizes.
        convolutions: number of layers with a short convolution in place of attention.
        delta_rule: the layers with a gated delta rule or Mamba-2 in place of attention.
        layer_inputs: elements of all that the host gathers for the layers of a token; 0 without.
        first_without_cache: the first of the last layers that own no cache; None if the last one owns one.
        outputs: rows of the head's matrix; None for one of each token of the vocabulary.
        experts: of a layer, whose matrices are those of one each; 1 without.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_head: bool = False
    kinds: tuple[LayerKind, ...] = ()
    convolutions: int = 0
    delta_rule: DeltaRule | None = None
    layer_inputs: int = 0
    first_without_cache: int | None = None
    outputs: int | None = None
    experts: int = 1

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers by their matrices."""
        if self.kinds:
            return self.kinds
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = attention_matrices(self.hidden, queries, keys)
        matrices = *attention, *feed_forward_matrices(self.hidden, self.intermediate)
        return (LayerKind(tuple(range(self.layers)), matrices),)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of the largest layer."""
        return max(kind.parameters for kind in self.layer_kinds)

    @property
    def all_layer_parameters(self) -> int:
        """Elements of the matrices of all layers."""
        return sum(kind.layers * kind.parameters for kind in self.layer_kinds)

    @property
    def table_parameters(self) -> int:
        """Elements of the embedding table."""
        return self.vocab * self.hidden

    @property
    def result_width(self) -> int:
        """Rows of the head's matrix."""
        return self.vocab if self.outputs is None else self.outputs

    @property
    def head_parameters(self) -> int:
        """Elements of the head's matrix."""
        return self.result_width * self.hidden

    @property
    def host_parameters(self) -> int:
        """Elements of the table that the host alone reads."""
        return self.vocab * self.layer_inputs

    @property
    def is_large(self) -> bool:
        """Whether layers and embeddings have 500 M parameters or more."""
        return self.all_layer_parameters + self.table_parameters >= _LARGE_PARAMETERS

    @property
    def parameters(self) -> int:
        """Elements of all matrices that graphs multiply by; a tied head counts once."""
        return self.all_layer_parameters + self.table_parameters + (0 if self.tied_head else self.head_parameters)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights, without the headers of their files.

    Attributes:
        embedding_bytes: the table.
        layer_bytes: each layer.
        packed_bytes: bytes of each layer that contain two 4-bit integers.
        head_bytes: the last norm and the head.
        packed_head_bytes: bytes of the head that contain two 4-bit integers.
        shares_table: whether the table is the head's matrix, stored once.
        host_bytes: a table that the host alone reads, mapped; in none of the sums.
    """

    embedding_bytes: int
    layer_bytes: tuple[int, ...]
    packed_bytes: tuple[int, ...]
    head_bytes: int
    packed_head_bytes: int = 0
    shares_table: bool = False
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of all that is stored for graphs."""
        return self.compiled_bytes - self.embedding_bytes * self.shares_table

    @property
    def is_mostly_packed(self) -> bool:
        """Whether most bytes of the layers contain two 4-bit integers."""
        return 2 * sum(self.packed_bytes) > sum(self.layer_bytes)

    @property
    def compiled_bytes(self) -> int:
        """Of all that a graph which looks up embeddings holds: the compiler stores a shared table twice."""
        return self.embedding_bytes + sum(self.layer_bytes) + self.head_bytes


@dataclass(frozen=True, slots=True)
class LayerTypes:
    """Weight types of a layer's matrices in a shipped recipe.

    Attributes:
        dtype: of most matrices.
        int8: those in int8.
        lpbq64: those in int4 with blocks of 64.
    """

    dtype: WeightDtype
    int8: frozenset[MatrixRole]
    lpbq64: frozenset[MatrixRole] = frozenset()

    def of(self, role: MatrixRole, *, in_end: bool = False) -> WeightType:
        """The type of a matrix, in an end layer or in another one."""
        is_wide = in_end or role in self.int8
        return WEIGHT_TYPES["int8" if is_wide else "lpbq64" if role in self.lpbq64 else self.dtype]

    def layer_bytes(self, kind: LayerKind, *, in_end: bool) -> tuple[int, int]:
        """Bytes of the matrices of a layer, and those of them that contain two 4-bit integers each."""
        matrices = [(self.of(role, in_end=in_end), rows, columns) for role, rows, columns in kind.matrices]
        all_bytes = sum(dtype.matrix_bytes(rows, columns) for dtype, rows, columns in matrices)
        return all_bytes, sum(dtype.packed_bytes(rows, columns) for dtype, rows, columns in matrices)


_LAYERS_PER_END, _LARGE_PARAMETERS = 12, 500_000_000
_IN_8_BITS: frozenset[MatrixRole] = frozenset(
    {"k", "v", "head_gate", "conv_in", "conv_out", "delta_rates", "router", "layer_gate", "layer_out"}
)
RECIPE_TYPES = {weight_type.recipe: LayerTypes(name, _IN_8_BITS) for name, weight_type in WEIGHT_TYPES.items()} | {
    "w4a16-lpbq32-updown8": LayerTypes("lpbq32", _IN_8_BITS | {"up", "down"}),
    "w4a16-uplpbq64-down8": LayerTypes("int4", _IN_8_BITS | {"down"}, frozenset({"up"})),
}
"""Weight types of the layers in the shipped recipes, by name; the head is int8, if the name does not say more."""


def end_layers(decoder: Decoder) -> frozenset[int]:
    """The layers that 4-bit recipes keep at 8 bits: the first one, and one in twelve at the end, such as 28, 29 of 30.

    There 4 bits lose most. A decoder of fewer than 12 layers has none, and one of 500 M parameters or more neither: it
    loses less, and its speed is bound by bytes.
    """
    last = decoder.layers // _LAYERS_PER_END
    if not last or decoder.is_large:
        return frozenset()
    return frozenset({0, *range(decoder.layers - last, decoder.layers)})


HEAD_MARK = "-head-"
"""What stands in a recipe's name between that of the other matrices and the type of the head: `w4a16-head-int4`."""
HEAD_TYPES = tuple(name for name, weight_type in WEIGHT_TYPES.items() if weight_type.is_packed)
"""The types that a name can give to the head."""

FRONT = "front-"
"""How the names of recipes begin that say how many bits a weight of the layers has on average, with its scales."""
MIN_BITS, MAX_BITS = 4, 8


def head_type(recipe: str) -> tuple[str, WeightDtype]:
    """The recipe of all other matrices in the name of a recipe such as `w4a16-head-int4`, and the type of the head."""
    base, _, ending = recipe.rpartition(HEAD_MARK)
    weight_type = next((name for name in HEAD_TYPES if name == ending), None)
    return (recipe, "int8") if weight_type is None else (base, weight_type)


def front_bits(recipe: str) -> float | None:
    """The bits in the name of a recipe such as `front-4.5`; None if it is no such name."""
    text = recipe.removeprefix(FRONT)
    if text == recipe or not re.fullmatch(r"\d(\.\d{1,3})?", text) or not MIN_BITS <= float(text) <= MAX_BITS:
        return None
    return float(text)


def recipe_weights(decoder: Decoder, recipe: str) -> Weights:
    """The weights in one of the recipes of `RECIPE_TYPES`, or in one that `front_bits` knows, with any `head_type`.

    One byte for each element of a matrix, or half a byte; four for the scale of each of its output channels, and one
    for each of their blocks; one for each element of the embedding table, and six for each of its rows; two for each
    element of a norm. A tied head of 8 bits is the table, and a matrix in front of it turns what it reads. Biases, q
    and k norms and post-norms are not counted. Where a recipe names bits, the export chooses which matrices have 4 or
    8: each layer is counted with its share.
    """
    recipe, head = head_type(recipe)
    bits, is_shared = front_bits(recipe), decoder.tied_head and head == "int8"
    layers, packed = [2 * 2 * decoder.hidden] * decoder.layers, [0] * decoder.layers
    ends = end_layers(decoder)
    for kind in decoder.layer_kinds:
        if bits is not None:
            inner = end = (
                round(kind.parameters * bits / 8),
                round(kind.parameters / 2 * (MAX_BITS - bits) / (MAX_BITS - MIN_BITS)),
            )
        else:
            inner, end = (RECIPE_TYPES[recipe].layer_bytes(kind, in_end=in_end) for in_end in (False, True))
        for layer in kind.numbers:
            all_bytes, packed_bytes = end if layer in ends else inner
            layers[layer] += all_bytes
            packed[layer] += packed_bytes
    byte = WEIGHT_TYPES["int8"]
    table_bytes, step_bytes = byte.matrix_bytes(decoder.hidden, decoder.vocab), 2 * decoder.vocab
    turn_bytes = byte.matrix_bytes(decoder.hidden, decoder.hidden) + step_bytes if is_shared else 0
    head_bytes = WEIGHT_TYPES[head].matrix_bytes(decoder.hidden, decoder.result_width)
    return Weights(
        embedding_bytes=table_bytes + step_bytes,
        layer_bytes=tuple(layers),
        packed_bytes=tuple(packed),
        head_bytes=head_bytes + turn_bytes + 2 * decoder.hidden,
        packed_head_bytes=WEIGHT_TYPES[head].packed_bytes(decoder.hidden, decoder.result_width),
        shares_table=is_shared,
        host_bytes=decoder.host_parameters and byte.matrix_bytes(decoder.layer_inputs, decoder.vocab),
    )
