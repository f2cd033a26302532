"""A model in parts: what each needs while it is compiled and on the device; the encoder's too."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from edgekv.plan.options import HTP_CONTEXT_BYTES, PROTOBUF_BYTES
from edgekv.spec import EncoderSpec

COMPILE_BYTES = 6_000_000_000
"""RAM target for compiling one part: available on a laptop with 8 GB."""

_PROCESS_BYTES = 148_000_000
_PER_WEIGHT_BYTE = 4.2
_PER_GRAPH_BYTE = 171
_MORE_PER_WEIGHT_BYTE = 3.4  # per further graph: the compiler shares their weights only at the end
_PER_PACKED_BYTE = 1.7  # the compiler unpacks 4-bit integers


def compile_bytes(weights_bytes: int, graph_bytes: int, graphs: int, *, packed_bytes: int = 0) -> int:
    """Estimated RAM to compile graphs with shared weights into one binary.

    Args:
        weights_bytes: weights of one graph.
        graph_bytes: file of one graph, without weights.
        graphs: number of graphs.
        packed_bytes: the part of the weights' bytes that contain two integers.
    """
    weights = (_PER_WEIGHT_BYTE + (graphs - 1) * _MORE_PER_WEIGHT_BYTE) * weights_bytes
    return _PROCESS_BYTES + round(weights + _PER_PACKED_BYTE * packed_bytes + graphs * _PER_GRAPH_BYTE * graph_bytes)


CALIBRATION_TILES = 6
"""Pictures that export draws."""

COMPRESSED = 0.115
"""Share of a graph that is left in its file: 0.116 and 0.109 of the two of SmolLM2-135M."""

_HEAD_GRAPH_BYTES, _LAYER_GRAPH_BYTES, _ENDS_GRAPH_BYTES = 5_143, 3_520, 7_000
_ENCODER_PROCESS_BYTES = 120_000_000
_COMPILER = 1.36  # of what decoders of this size take: 0.95 GB for SmolVLM2's, 2.43 for InternVL3.5's


class EncoderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder, which has a graph and an HTP context of its own.

    Attributes:
        image: edge of a tile, in pixels.
        tokens: rows that a tile becomes in a prompt.
        parameters: elements of all matrices.
        weights_bytes: int8 matrices with their scales, and tensors of 16 bits.
        activations_bytes: an upper estimate, as that of the decoder's graphs.
        graph_bytes: its graph without weights, before it is compressed.
        quantization_peak_bytes: RAM to quantize it.
        compile_peak_bytes: RAM to compile it.
    """

    image: int
    tokens: int
    parameters: int
    weights_bytes: int
    activations_bytes: int
    graph_bytes: int
    quantization_peak_bytes: int
    compile_peak_bytes: int

    @property
    def used_bytes(self) -> int:
        """Of its HTP context."""
        return self.weights_bytes + self.activations_bytes

    @property
    def bundle_bytes(self) -> int:
        """On disk."""
        return self.weights_bytes + round(COMPRESSED * self.graph_bytes)

    @classmethod
    def of(cls, spec: EncoderSpec, tiles: int = CALIBRATION_TILES, *, fits: bool = False) -> EncoderPlan:
        """The plan of an encoder that is calibrated on so many tiles.

        Args:
            spec: its sizes.
            tiles: their number.
            fits: whether matrices are rounded on their inputs, as `--effort 3` and above do.
        """
        matrices, tensors = spec.matrices.values(), spec.tensors.values()
        parameters = sum(rows * columns for rows, columns in matrices)
        weights_bytes = parameters + sum(4 * rows for rows, _ in matrices) + 2 * sum(map(math.prod, tensors))
        graph_bytes = spec.layers * (spec.heads * _HEAD_GRAPH_BYTES + _LAYER_GRAPH_BYTES) + _ENDS_GRAPH_BYTES
        return cls(
            image=spec.image,
            tokens=spec.rows,
            parameters=parameters,
            weights_bytes=weights_bytes,
            activations_bytes=2 * spec.inputs * (3 * spec.hidden + 2 * max(spec.inputs, spec.intermediate)),
            graph_bytes=graph_bytes,
            quantization_peak_bytes=_ENCODER_PROCESS_BYTES + quantization_bytes(spec, tiles, fits=fits),
            compile_peak_bytes=round(_COMPILER * compile_bytes(weights_bytes, graph_bytes, 1)),
        )


def quantization_bytes(spec: EncoderSpec, tiles: int, *, fits: bool = False) -> int:
    """RAM to quantize an encoder: a layer in float32, all matrices as integers, and the largest results of a tile.

    To round a layer on its inputs, those of all its matrices too, twice the largest, and their second moments.
    """
    integers = sum(rows * columns for rows, columns in spec.matrices.values())
    layer = 4 * spec.hidden * (4 * spec.hidden + 2 * spec.intermediate)
    read = 0 if spec.layer_rows is None else spec.layer_rows.elements
    projector = 12 * spec.output * max(spec.hidden * spec.merged, read)
    results = 12 * spec.patches * max(spec.patches, spec.intermediate, spec.patch_values)
    inputs = 0
    if fits:
        widths = (spec.hidden, spec.intermediate, spec.merged * spec.hidden, spec.patch_values)
        inputs = 4 * tiles * spec.inputs * (3 * spec.hidden + 2 * max(widths)) + 4 * 4 * max(widths) ** 2
    return integers + max(2 * layer, projector) + results + 8 * tiles * spec.patches * spec.patch_values + inputs


@dataclass(frozen=True, slots=True)
class Load:
    """The model to divide.

    Attributes:
        layers: bytes of the weights of each layer.
        packed: the part of each layer's bytes that contain two integers.
        embedding_bytes: the embedding table.
        head_bytes: the last norm and the head.
        packed_head_bytes: the part of the head's bytes that contain two integers.
        cache: bytes of the cache of each layer.
        activations_bytes: bytes needed in every HTP context.
        layer_graph_bytes: one layer's share of the file of one graph, without weights.
        graphs: AR numbers times contexts, all compiled into one binary.
        boundary: a layer that begins a part, as the first of the last layers that own no cache does; None for none.
    """

    layers: Sequence[int]
    packed: Sequence[int]
    embedding_bytes: int
    head_bytes: int
    packed_head_bytes: int
    cache: Sequence[int]
    activations_bytes: int
    layer_graph_bytes: int
    graphs: int
    boundary: int | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one HTP context.

    Attributes:
        embedding: whether it includes the embedding table.
        first_layer: its first layer; for a part that is only the head, the number after the last layer.
        layers: number of layers.
        head: whether it includes the last norm and the head.
        used_bytes: weights, cache of these layers, and activations.
        graph_bytes: file of one graph, without weights.
        compile_peak_bytes: RAM to compile all graphs of the part into one binary: an estimate.
    """

    embedding: bool
    first_layer: int
    layers: int
    head: bool
    used_bytes: int
    graph_bytes: int
    compile_peak_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it stays within all limits."""
        return self.is_runnable and self.compile_peak_bytes <= COMPILE_BYTES

    @property
    def is_runnable(self) -> bool:
        """Whether it fits one HTP context and one protobuf, regardless of the RAM to compile it."""
        return self.used_bytes <= HTP_CONTEXT_BYTES and self.graph_bytes <= PROTOBUF_BYTES


def divide(
    layers: Sequence[int], splits: int, *, first_bytes: int = 0, last_bytes: int = 0, boundary: int | None = None
) -> tuple[range, ...]:
    """The layers in `splits` parts, none of them empty, cut where each part is nearest to an even share of the bytes.

    Args:
        layers: bytes of each layer.
        splits: number of parts; at most the number of layers.
        first_bytes: additional bytes of the first part.
        last_bytes: additional bytes of the last part.
        boundary: a layer that begins a part, so that two parts are the least; None for none.

    Raises:
        ValueError: fewer than one part, or more parts than layers.
    """
    count = len(layers)
    if not 1 <= splits <= count:
        raise ValueError(f"splits: got {splits}; expected 1 to {count}, the layers")
    if boundary is not None:
        before, behind, parts = layers[:boundary], layers[boundary:], max(2, splits)
        share = (first_bytes + sum(before)) / (first_bytes + sum(layers) + last_bytes)
        own = min(max(1, round(parts * share), parts - len(behind)), parts - 1, len(before))
        front = divide(before, own, first_bytes=first_bytes)
        more = divide(behind, parts - own, last_bytes=last_bytes)
        return *front, *(range(boundary + part_layers.start, boundary + part_layers.stop) for part_layers in more)
    ends = [first_bytes + end for end in accumulate(layers, initial=0)]
    share = (ends[-1] + last_bytes) / splits
    cuts = [0]
    for part in range(1, splits):
        after = bisect_left(ends, part * share, 1, count)
        nearest = after - 1 if part * share - ends[after - 1] <= ends[after] - part * share else after
        cuts.append(min(max(nearest, cuts[-1] + 1), count - splits + part))
    return tuple(range(start, stop) for start, stop in pairwise((*cuts, count)))


def lay_out(load: Load, splits: int) -> tuple[Part, ...]:
    """The default parts of an export: one with everything, or `splits` parts of layers and a separate head.

    If divided, the host looks up embeddings. One with everything is two if it has a boundary.
    """
    if splits == 1:
        ends = load.embedding_bytes, load.head_bytes
        ranges = divide(load.layers, 1, first_bytes=ends[0], last_bytes=ends[1], boundary=load.boundary)
        return tuple(_part(load, layers, embedding=layers is ranges[0], head=layers is ranges[-1]) for layers in ranges)
    parts = [_part(load, layers) for layers in divide(load.layers, splits, boundary=load.boundary)]
    return (*parts, _part(load, range(len(load.layers), len(load.layers)), head=True))


def smallest_parts(load: Load) -> tuple[Part, ...]:
    """The kinds of parts in the finest division, each once: a single layer of each kind, and the head."""
    if len(load.layers) == 1:
        return lay_out(load, 1)
    kinds = {kind: layer for layer, kind in enumerate(zip(load.layers, load.packed, load.cache, strict=True))}
    parts = [_part(load, range(layer, layer + 1)) for layer in kinds.values()]
    return (*parts, _part(load, range(0), head=True))


def min_splits(load: Load) -> int | None:
    """The fewest splits whose parts all fit; None if even one layer a part is too large for an HTP context.

    The compiler's RAM alone never fails: if even one layer needs too much, each layer is a part.
    """
    count, smallest = len(load.layers), smallest_parts(load)
    if not are_runnable(smallest):
        return None
    if not all(part.fits for part in smallest):
        return count
    weights_bytes, graph_bytes = sum(load.layers), count * load.layer_graph_bytes
    compiling_bytes = compile_bytes(weights_bytes, graph_bytes, load.graphs, packed_bytes=sum(load.packed))
    min_count = max(
        weights_bytes // HTP_CONTEXT_BYTES, graph_bytes // PROTOBUF_BYTES, compiling_bytes // COMPILE_BYTES, 1
    )
    fitting = (splits for splits in range(min_count, count) if all(part.fits for part in lay_out(load, splits)))
    return next(fitting, count)


def are_runnable(parts: Sequence[Part]) -> bool:
    """Whether each part fits one HTP context and one protobuf."""
    return all(part.is_runnable for part in parts)


def _part(load: Load, layers: range, *, embedding: bool = False, head: bool = False) -> Part:
    weights_bytes = sum(load.layers[layer] for layer in layers)
    weights_bytes += load.embedding_bytes * embedding + load.head_bytes * head
    graph_bytes = len(layers) * load.layer_graph_bytes
    cache_bytes = sum(load.cache[layer] for layer in layers)
    return Part(
        embedding=embedding,
        first_layer=layers.start,
        layers=len(layers),
        head=head,
        used_bytes=weights_bytes + cache_bytes + load.activations_bytes,
        graph_bytes=graph_bytes,
        compile_peak_bytes=compile_bytes(
            weights_bytes,
            graph_bytes,
            load.graphs if layers else 1,
            packed_bytes=sum(load.packed[layer] for layer in layers) + load.packed_head_bytes * head,
        ),
    )
