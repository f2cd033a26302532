"""How a decoder is divided into parts: its layers, the embedding and the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgekv.errors import UsageError
from edgekv.plan import Load, activation_bytes, divide, layer_graph_bytes, min_splits
from edgekv.plan.cache import CHOICES
from edgekv.spec import Geometry
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import HEAD, matrices
from exporters.graphs.places import EmbeddingPlace, HeadPlace
from exporters.quantize.recipe import Recipe
from quant import WEIGHT_TYPES, WeightType


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of every graph.

    Attributes:
        layers: of each part, in order.
        embeds: whether the first part looks up embeddings, instead of the host.
        own_head: whether the head is a separate last part instead of in the last part with layers.
    """

    layers: tuple[range, ...]
    embeds: bool = True
    own_head: bool = False

    @classmethod
    def whole(cls, layers: int, *, embeds: bool = True) -> Split:
        """All layers and the head in one part."""
        return cls((range(layers),), embeds)

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
    geometry: Geometry,
    ar: Sequence[int],
    graphs: int,
) -> Split:
    """The requested split, with defaults for what is None: one part if it stays within all limits.

    If the last layers own no cache, several parts end before them, and two is the least.

    If layers are divided, the default is that the host looks up embeddings and the head is a separate part, so that
    neither adds to a part of layers.

    Args:
        spec: the decoder.
        recipe: integer types of its matrices.
        splits: number of parts, without a separate head.
        embedding: where embeddings are looked up.
        head: `own` for a separate part.
        geometry: of the cache for the largest graphs.
        ar: tokens per inference of each graph.
        graphs: number of graphs compiled into one binary: ARs times contexts.

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
    layers = layer_bytes(spec, recipe, WeightType.matrix_bytes)
    decoder, of_head = spec.sizes, WEIGHT_TYPES[recipe.rule(HEAD).dtype]
    load = Load(
        layers=layers,
        packed=layer_bytes(spec, recipe, WeightType.packed_bytes),
        embedding_bytes=WEIGHT_TYPES["int8"].matrix_bytes(spec.hidden, spec.vocab),
        head_bytes=of_head.matrix_bytes(spec.hidden, spec.result_width),
        packed_head_bytes=of_head.packed_bytes(spec.hidden, spec.result_width),
        cache=CHOICES[0].layer_bytes(geometry, ar),
        activations_bytes=activation_bytes(decoder, geometry, max(ar)),
        layer_graph_bytes=layer_graph_bytes(decoder),
        graphs=graphs,
        boundary=decoder.first_without_cache,
    )
    # If no division is small enough, keep one part and let the compiler report the limit.
    chosen = splits or min_splits(load) or 1
    place = ("graph" if chosen == 1 else "host") if embedding is None else embedding
    own_head = chosen > 1 if head is None else head == "own"
    first = load.embedding_bytes if place == "graph" else 0
    last = 0 if own_head else load.head_bytes
    boundary = None if splits == 1 else load.boundary
    ranges = divide(layers, chosen, first_bytes=first, last_bytes=last, boundary=boundary)
    return Split(ranges, place == "graph", own_head)


def layer_bytes(spec: DecoderSpec, recipe: Recipe, count: Callable[[WeightType, int, int], int]) -> Sequence[int]:
    """Bytes of the matrices of each layer; `count` gives the bytes of one matrix."""
    bytes_of_layers = [0] * spec.layers
    for name, (columns, rows) in matrices(spec).items():
        if name.startswith("model.layers."):
            bytes_of_layers[int(name.split(".")[2])] += count(WEIGHT_TYPES[recipe.rule(name).dtype], rows, columns)
    return bytes_of_layers
