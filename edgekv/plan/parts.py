"""Parting a model over several HTP contexts."""

from __future__ import annotations

import msgspec

from edgekv.size import Weights


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in one context.

    Attributes:
        embedding: whether the embedding table does.
        first_layer: the first of its layers; where it has none, the next part's.
        layers: how many layers.
        head: whether the last norm and the head do.
        used_bytes: weights, cache of these layers, and activations.
    """

    embedding: bool
    first_layer: int
    layers: int
    head: bool
    used_bytes: int


def pack(
    weights: Weights, *, layer_cache_bytes: int, activations_bytes: int, context_bytes: int
) -> tuple[Part, ...] | None:
    """The fewest parts, in the order of the model, each within a context; None if a single piece is too large.

    Pieces are the embedding, each layer with its cache, and the head; they are laid into a context until the next
    one would not fit, which gives the fewest parts for pieces in a fixed order.

    Args:
        weights: bytes of the pieces.
        layer_cache_bytes: cache of one layer.
        activations_bytes: needed in every context.
        context_bytes: what one context holds.
    """
    pieces = [weights.embedding_bytes, *[weights.layer_bytes + layer_cache_bytes] * weights.layers, weights.head_bytes]
    room_bytes = context_bytes - activations_bytes
    if max(pieces) > room_bytes:
        return None
    starts, used = [0], [0]
    for i, piece_bytes in enumerate(pieces):
        if used[-1] + piece_bytes > room_bytes:
            starts.append(i)
            used.append(0)
        used[-1] += piece_bytes
    stops = [*starts[1:], len(pieces)]
    return tuple(
        Part(
            embedding=start == 0,
            first_layer=max(start, 1) - 1,
            layers=min(stop, len(pieces) - 1) - min(max(start, 1), len(pieces) - 1),
            head=stop == len(pieces),
            used_bytes=used_bytes + activations_bytes,
        )
        for start, stop, used_bytes in zip(starts, stops, used, strict=True)
    )
