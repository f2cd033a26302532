"""What the exporters need to know of a decoder: its sizes, and where its architecture differs from Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.spec.rope import Rope
from edgekv.spec.sizes import Decoder

Activation = Literal["silu", "gelu-tanh"]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention, gated feed-forward, RMSNorm and rotary embedding.

    The sizes come first; from `local_rope` on, the defaults are Llama's.

    Attributes:
        query_gain: multiplies the scores, such as head_dim ** -0.5.
        local_rope: rotary embedding of the layers that have a window, where it is not that of the others.
        windows: tokens that each layer attends to, itself included; None stands for all, and an empty tuple says that
            no layer is limited.
        limits: tokens that a layer attends to at most, whatever its own window is; None for no limit. A shorter list is
            repeated.
        activation: of the gate.
        biased: projections that add a bias, such as `self_attn.q_proj`.
        qk_norm: whether each head of queries and keys is normalized before it is rotated.
        post_norms: whether what attention and feed-forward add is normalized first.
        attention_cap: scores become cap * tanh(scores / cap).
        logits_cap: logits likewise.
        embedding_gain: multiplies the rows of the embedding table.
        norm_offset: added to the stored weights of every norm.
        fused: whether q, k and v are stored as one matrix, and gate and up as another.
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
    windows: tuple[int | None, ...] = ()
    limits: tuple[int | None, ...] = ()
    activation: Activation = "silu"
    biased: frozenset[str] = frozenset()
    qk_norm: bool = False
    post_norms: bool = False
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_gain: float = 1.0
    norm_offset: float = 0.0
    fused: bool = False

    def __post_init__(self) -> None:
        if len(self.windows) not in (0, self.layers):
            raise ValueError(f"windows: got {len(self.windows)}; expected none or {self.layers}, one for each layer")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}; expected a divisor of {self.heads} heads")

    @property
    def sizes(self) -> Decoder:
        """What plans are made with."""
        return Decoder(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            vocab=self.vocab,
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        """Tokens that a layer attends to, itself included, or None for all."""
        limit = self.limits[layer % len(self.limits)] if self.limits else None
        return min((each for each in (self._own_window(layer), limit) if each is not None), default=None)

    def windows_in(self, context: int) -> tuple[int | None, ...]:
        """The windows that are less than a context of S tokens, by layer; empty if there are none."""
        found = [self.window(layer) for layer in range(self.layers)]
        narrow = [window if window is not None and window < context else None for window in found]
        return () if narrow.count(None) == self.layers else tuple(narrow)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding, and the local one if there is one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_index(self, layer: int) -> int:
        """Which of `ropes` the layer has."""
        return int(self.local_rope is not None and self._own_window(layer) is not None)

    def rope_of(self, layer: int) -> Rope:
        """The layer's rotary embedding."""
        return self.ropes[self.rope_index(layer)]

    def _own_window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
