"""What checkpoints call the tensors of a vision encoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names without `.weight` and `.bias`; those of a layer have `{layer}` for its number.

    Attributes:
        patches: the convolution of pixels.
        positions: the table of position embeddings, with its whole name; empty without one.
        attention_norm: before attention.
        q: of queries; k and v alike. All three the same if they are one matrix, in this order.
        o: the projection of attention's results.
        feed_forward_norm: before the feed-forward.
        fc1: to the feed-forward's width.
        fc2: back to the residual's.
        last_norm: of each patch behind the layers; None without one.
        merged_norm: of the patches that become one row; None without one.
        projector: of merged patches.
        projector_out: its second matrix; None if it has one.
        class_row: the class, with its whole name; None without one.
        attention_scale: multiplies the outputs of attention, with its whole name; None without one.
        feed_forward_scale: multiplies the outputs of the feed-forward, with its whole name; None without one.
        deepstack: of the mergers behind some layers, with `{number}` for the number of each: a norm, and two matrices.
        projector_inputs: whether the projector's name is the whole one of a matrix `[in, out]`.
        bucketed: whether patches find their positions as SigLIP for any resolution does; else they are in order.
        frames: pictures that the convolution takes at a time; a single one is given to it as often, so that its parts
            are added. 0 if it takes one and says nothing of time.
        up: the matrix whose results are multiplied with those of `fc1`, if feed-forwards are gated; None without one.
        gemma: of Gemma's layers: the matrix that `fc1` gates, the norms of a head of queries and of keys, and those
            behind attention and the feed-forward. None for other layers.
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
    projector: str
    last_norm: str | None = None
    merged_norm: str | None = None
    projector_out: str | None = None
    class_row: str | None = None
    attention_scale: str | None = None
    feed_forward_scale: str | None = None
    deepstack: tuple[str, str, str] | None = None
    projector_inputs: bool = False
    bucketed: bool = False
    frames: int = 0
    up: str | None = None
    gemma: tuple[str, str, str, str, str] | None = None

    @property
    def projector_weight(self) -> str:
        """The whole name of the projector's matrix."""
        return self.projector if self.projector_inputs else self.projector + ".weight"

    @property
    def is_fused(self) -> bool:
        """Whether queries, keys and values have one matrix."""
        return self.q == self.k


def siglip_names(
    model: str,
    projector: str,
    *,
    projector_out: str | None = None,
    merged_norm: str | None = None,
    projector_inputs: bool = False,
    bucketed: bool = False,
) -> EncoderNames:
    """Names of transformers' SigLIP and SigLIP 2 behind a prefix, and those of the projector behind them."""
    layer = model + "encoder.layers.{layer}."
    return EncoderNames(
        patches=model + "embeddings.patch_embedding",
        positions=model + "embeddings.position_embedding.weight",
        attention_norm=layer + "layer_norm1",
        q=layer + "self_attn.q_proj",
        k=layer + "self_attn.k_proj",
        v=layer + "self_attn.v_proj",
        o=layer + "self_attn.out_proj",
        feed_forward_norm=layer + "layer_norm2",
        fc1=layer + "mlp.fc1",
        fc2=layer + "mlp.fc2",
        last_norm=model + "post_layernorm",
        projector=projector,
        projector_out=projector_out,
        merged_norm=merged_norm,
        projector_inputs=projector_inputs,
        bucketed=bucketed,
    )
