"""What checkpoints call the tensors of a vision encoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names without `.weight` and `.bias`; those of a layer have `{layer}` for its number.

    Attributes:
        patches: the convolution of pixels.
        positions: the table of position embeddings, with its whole name.
        attention_norm: before attention.
        q: of queries; k and v alike.
        o: the projection of attention's results.
        feed_forward_norm: before the feed-forward.
        fc1: to the feed-forward's width.
        fc2: back to the residual's.
        last_norm: behind the layers, or of merged patches if the projector has two matrices.
        projector: of merged patches.
        projector_out: its second matrix; None if it has one.
        class_row: the class, with its whole name; None without one.
        attention_scale: multiplies the outputs of attention, with its whole name; None without one.
        feed_forward_scale: of the feed-forward; likewise.
    """

    patches: str
    positions: str
    attention_norm: str
    q: str
    k: str
    v: str
    o: str
    feed_forward_norm: str
    fc1: str
    fc2: str
    last_norm: str
    projector: str
    projector_out: str | None = None
    class_row: str | None = None
    attention_scale: str | None = None
    feed_forward_scale: str | None = None
