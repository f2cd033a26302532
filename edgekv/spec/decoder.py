"""The decoder of a checkpoint: its sizes, and where its architecture differs from Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.spec.rope import Rope
from edgekv.spec.sizes import Decoder

Activation = Literal["silu", "gelu-tanh"]
QkNorm = Literal["head", "all-heads"]


@dataclass(frozen=True, slots=True)
class SplitChannel:
    """A channel x of the residual that stands for several equal ones, each x / sqrt(parts): it is stored once.

    Attributes:
        channel: its number.
        parts: how often norms of the residual read it; a power of 4.
    """

    channel: int
    parts: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder with grouped-query attention, gated feed-forward, RMSNorm and rotary embedding.

    Sizes come first. From `local_rope` on, the defaults are Llama's.

    Attributes:
        max_positions: the longest context that can be exported.
        bound_by: the field of `config.json` that sets it.
        query_gain: multiplies the scores, such as head_dim ** -0.5.
        local_rope: rotary embedding of the layers with an attention window, if they have their own.
        unrotated: layers without a rotary embedding.
        windows: tokens that each layer attends to, including the current one; None for full attention; empty if no
            layer has a window.
        limits: upper bounds of the windows, None for no bound; a shorter list is repeated. Set by export options.
        activation: activation function of the gate.
        biased: projections with a bias, such as `self_attn.q_proj`.
        qk_norm: RMSNorm of queries and keys before their rotation: over each head, over all heads together, or None.
        pre_norms: whether the inputs of attention and feed-forward are normalized.
        post_norms: whether their outputs are normalized before they are added to the residual.
        attention_cap: scores become cap * tanh(scores / cap).
        logits_cap: the same for logits.
        embedding_gain: multiplies the embeddings.
        residual_gain: multiplies the outputs of attention and feed-forward.
        logits_gain: multiplies the logits.
        norm_offset: added to the stored weights of every norm.
        split: channels of the residual that norms read several times, in ascending order. Set by export.
        fused: whether q, k and v are stored as one matrix, and gate and up as another.
        multimodal: whether the checkpoint includes a vision model, and the decoder's tensors have a prefix.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    eps: float
    tied_head: bool
    rope: Rope
    query_gain: float
    local_rope: Rope | None = None
    unrotated: frozenset[int] = frozenset()
    windows: tuple[int | None, ...] = ()
    limits: tuple[int | None, ...] = ()
    activation: Activation = "silu"
    biased: frozenset[str] = frozenset()
    qk_norm: QkNorm | None = None
    pre_norms: bool = True
    post_norms: bool = False
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_gain: float = 1.0
    residual_gain: float = 1.0
    logits_gain: float = 1.0
    norm_offset: float = 0.0
    split: tuple[SplitChannel, ...] = ()
    fused: bool = False
    multimodal: bool = False
    bound_by: str = "max_position_embeddings"

    def __post_init__(self) -> None:
        if len(self.windows) not in (0, self.layers):
            raise ValueError(f"windows: got {len(self.windows)}; expected none or {self.layers}, one for each layer")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}; expected a divisor of {self.heads} heads")

    @property
    def sizes(self) -> Decoder:
        """The sizes that plans and estimates need."""
        return Decoder(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            vocab=self.vocab,
            tied_head=self.tied_head,
        )

    @property
    def copies(self) -> int:
        """Elements that norms of the residual read besides its channels."""
        return sum(each.parts - 1 for each in self.split)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        """Tokens that a layer attends to, including the current one; None for all."""
        limit = self.limits[layer % len(self.limits)] if self.limits else None
        return min((each for each in (self._own_window(layer), limit) if each is not None), default=None)

    def windows_in(self, context: int) -> tuple[int | None, ...]:
        """The windows that are smaller than a context of S tokens, by layer; empty if there are none."""
        found = [self.window(layer) for layer in range(self.layers)]
        narrow = [window if window is not None and window < context else None for window in found]
        return () if narrow.count(None) == self.layers else tuple(narrow)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding, and the local one if there is one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer, or None."""
        if layer in self.unrotated:
            return None
        return self.rope if self.local_rope is None or self._own_window(layer) is None else self.local_rope

    def layers_with(self, rope: Rope) -> list[int]:
        """The layers with this rotary embedding, one of `ropes`."""
        return [layer for layer in range(self.layers) if self.rope_of(layer) is rope]

    def _own_window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
