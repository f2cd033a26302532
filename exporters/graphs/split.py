"""How the layers of a decoder are divided over graphs, and what stands in front of them and behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgekv.errors import UsageError
from edgekv.plan import Load, activation_bytes, divide, layer_graph_bytes, least_splits
from edgekv.plan.cache import CHOICES
from edgekv.spec import Geometry, LayeredGeometry
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import HEAD, matrices
from exporters.quantize.recipe import Recipe
from quant import WEIGHT_TYPES, WeightType

EmbeddingPlace = Literal["graph", "host"]
HeadPlace = Literal["own", "last"]


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of every graph.

    Attributes:
        layers: of each part, in order.
        embeds: whether the first part looks embeddings up, instead of the host.
        own_head: whether the head is a part by itself, behind the others, instead of in the last of them.
    """

    layers: tuple[range, ...]
    embeds: bool = True
    own_head: bool = False

    @classmethod
    def whole(cls, layers: int) -> Split:
        """Everything in one part."""
        return cls((range(layers),))

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == 1 and self.embeds and not self.own_head


def choose_split(
    spec: DecoderSpec,
    recipe: Recipe,
    *,
    splits: int | None,
    embedding: EmbeddingPlace | None,
    head: HeadPlace | None,
    geometry: Geometry | LayeredGeometry,
    ar: Sequence[int],
    graphs: int,
) -> Split:
    """The split that was asked for; what is None is chosen: one part as long as it stays inside all limits.

    Where layers are divided, the host looks embeddings up and the head is a part by itself, unless it is said
    otherwise: neither then weighs on a part of layers.

    Args:
        spec: the decoder.
        recipe: integer types of its matrices.
        splits: parts of layers, a head by itself not counted.
        embedding: where embeddings are looked up.
        head: whether the head is a part by itself.
        geometry: of the cache for the largest graphs.
        ar: tokens per inference of each graph.
        graphs: how many are compiled into one binary: AR times contexts.

    Raises:
        UsageError: more parts than layers.
    """
    if splits is not None and not 1 <= splits <= spec.layers:
        raise UsageError(
            "--splits",
            got=splits,
            expected=f"1 to {spec.layers}, the layers of the checkpoint",
            fix=f"Use --splits {min(spec.layers, max(1, splits))}, or leave it out.",
        )
    layers = _layer_bytes(spec, recipe, WeightType.matrix_bytes)
    decoder = spec.sizes
    load = Load(
        layers=layers,
        packed=_layer_bytes(spec, recipe, WeightType.packed_bytes),
        embedding_bytes=2 * decoder.table_parameters,
        head_bytes=WEIGHT_TYPES[recipe.rule(HEAD).dtype].matrix_bytes(spec.hidden, spec.vocab),
        cache=CHOICES[0].layer_bytes(geometry, ar),
        activations_bytes=activation_bytes(decoder, geometry, max(ar)),
        layer_graph_bytes=layer_graph_bytes(decoder),
        graphs=graphs,
    )
    # What no division makes small enough is left whole: the compiler says what it thinks of it.
    chosen = splits or least_splits(load) or 1
    place = ("graph" if chosen == 1 else "host") if embedding is None else embedding
    own_head = chosen > 1 if head is None else head == "own"
    first = load.embedding_bytes if place == "graph" else 0
    last = 0 if own_head else load.head_bytes
    return Split(divide(layers, chosen, first_bytes=first, last_bytes=last), place == "graph", own_head)


def _layer_bytes(spec: DecoderSpec, recipe: Recipe, count: Callable[[WeightType, int, int], int]) -> Sequence[int]:
    """Bytes of the matrices of each layer, as `count` has them of one."""
    found = [0] * spec.layers
    for name, (columns, rows) in matrices(spec).items():
        if name != HEAD:
            found[int(name.split(".")[2])] += count(WEIGHT_TYPES[recipe.rule(name).dtype], rows, columns)
    return found
