"""Dividing a model over parts that each stay inside the limits of the HTP, of protobuf, and of the compiler's RAM."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from edgekv.plan.cache import HTP_CONTEXT_BYTES
from edgekv.plan.compiling import COMPILE_BYTES, compile_bytes

PROTOBUF_BYTES = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Load:
    """What is divided.

    Attributes:
        layers: bytes of the weights of each layer.
        packed: those of each layer that hold two integers.
        embedding_bytes: of the table.
        head_bytes: of the last norm and the head.
        layer_cache_bytes: cache of one layer.
        activations_bytes: needed in every context.
        layer_graph_bytes: file of one layer of one graph, without weights.
        graphs: AR times contexts, all compiled into one binary.
    """

    layers: Sequence[int]
    packed: Sequence[int]
    embedding_bytes: int
    head_bytes: int
    layer_cache_bytes: int
    activations_bytes: int
    layer_graph_bytes: int
    graphs: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in one context.

    Attributes:
        embedding: whether the embedding table does.
        first_layer: the first of its layers; behind the last one in a part that is a head by itself.
        layers: how many layers.
        head: whether the last norm and the head do.
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
        """Whether it stays inside all limits."""
        return self.is_runnable and self.compile_peak_bytes <= COMPILE_BYTES

    @property
    def is_runnable(self) -> bool:
        """Whether one context and one protobuf hold it, however much RAM its compilation takes."""
        return self.used_bytes <= HTP_CONTEXT_BYTES and self.graph_bytes <= PROTOBUF_BYTES


def divide(layers: Sequence[int], splits: int, *, first_bytes: int = 0, last_bytes: int = 0) -> tuple[range, ...]:
    """Layers in so many parts, none of them empty, each cut where it is nearest to an even share of the bytes.

    Args:
        layers: bytes of each.
        splits: how many parts; at most as many as layers.
        first_bytes: what the first part holds besides.
        last_bytes: what the last part holds besides.
    """
    count = len(layers)
    if not 1 <= splits <= count:
        raise ValueError(f"splits: got {splits}; expected 1 to {count}, the layers")
    ends = [first_bytes + end for end in accumulate(layers, initial=0)]
    share = (ends[-1] + last_bytes) / splits
    cuts = [0]
    for part in range(1, splits):
        after = bisect_left(ends, part * share, 1, count)
        nearest = after - 1 if part * share - ends[after - 1] <= ends[after] - part * share else after
        cuts.append(min(max(nearest, cuts[-1] + 1), count - splits + part))
    return tuple(range(start, stop) for start, stop in pairwise((*cuts, count)))


def lay_out(load: Load, splits: int) -> tuple[Part, ...]:
    """The parts that export makes of so many splits, if nothing else is asked for.

    One holds everything. With several the host looks embeddings up, and the head is a part by itself.
    """
    if splits == 1:
        return (_part(load, range(len(load.layers)), embedding=True, head=True),)
    parts = [_part(load, layers) for layers in divide(load.layers, splits)]
    return (*parts, _part(load, range(len(load.layers), len(load.layers)), head=True))


def least_splits(load: Load) -> int | None:
    """The fewest splits whose parts all fit; None if one layer a part is too large for a context.

    The compiler's RAM is no reason to give up: where even one layer a part takes more, layers are divided so far.
    """
    most = lay_out(load, len(load.layers))
    if not all(part.is_runnable for part in most):
        return None
    counts = range(1, len(load.layers) + 1)
    return next((splits for splits in counts if all(part.fits for part in lay_out(load, splits))), counts[-1])


def _part(load: Load, layers: range, *, embedding: bool = False, head: bool = False) -> Part:
    weights_bytes = sum(load.layers[layer] for layer in layers)
    weights_bytes += load.embedding_bytes * embedding + load.head_bytes * head
    graph_bytes = len(layers) * load.layer_graph_bytes
    cache_bytes = len(layers) * load.layer_cache_bytes
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
            packed_bytes=sum(load.packed[layer] for layer in layers),
        ),
    )
