"""The sizes of a KV cache, in integers; used by all of `edgekv.kv`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["u8", "s8", "s16", "u16"]
"""Type of a cache tensor. `u16` is for states alone: no product of matrices reads it as its second operand."""
Kind = Literal["key", "value", "conv", "delta_key", "delta_value", "decay", "recurrent"]
KeyLayout = Literal["rows", "columns"]

_ELEMENT_BYTES: dict[KvDtype, int] = {"u8": 1, "s8": 1, "s16": 2, "u16": 2}
ZERO_POINTS: dict[KvDtype, int] = {"u8": 128, "s8": 0, "s16": 0, "u16": 32768}
KINDS: tuple[Kind, Kind] = ("key", "value")
"""Of layers with attention: a row per token and head."""
STATE_KINDS: tuple[Kind] = ("conv",)
"""Of layers with a short convolution: the rows before the next token that its kernel reads, of all channels."""
DELTA_KINDS: tuple[Kind, ...] = ("delta_key", "delta_value", "decay", "recurrent")
"""Of layers with a gated delta rule: rows of keys and of corrections of all heads, and of the decays of one head; and
the matrices S of all heads, beside each other. The convolution before it has a state too."""
CHECKPOINT_TOKENS = 64
"""Tokens between two checkpoints of a gated delta rule, and P, the rows that a step reads of its tail. No step crosses
a checkpoint: results would depend on how a text is divided into steps."""


@dataclass(frozen=True, slots=True)
class KvTensor:
    """A cache tensor of one head, or a state, and the names of its input and output in every graph (Genie's names)."""

    layer: int
    kind: Kind
    head: int

    @property
    def past(self) -> str:
        """The graph input `[1, 1, S-AR, D]`, or `[1, 1, D, S-AR]` for keys as columns; `[1, 1, K-1, H]` for states."""
        return f"{self._stem}_in"

    @property
    def new(self) -> str:
        """The graph output `[1, 1, AR, D]`, or `[1, 1, D, AR]` for keys as columns."""
        return f"{self._stem}_out"

    @property
    def others(self) -> str:
        """The input `[1, 1, (K-1) * AR, H]` of a verify graph: states of other sequences, K-1 rows for each token."""
        return f"{self._stem}_others"

    @property
    def is_state(self) -> bool:
        """Whether it is the state of a layer without attention."""
        return self.kind not in KINDS

    @property
    def is_written(self) -> bool:
        """Whether graphs write rows of it; the matrices of a gated delta rule follow from rows."""
        return self.kind != "recurrent"

    @property
    def _stem(self) -> str:
        if self.kind in DELTA_KINDS:
            stem = f"{self.kind}_state_{self.layer}"
            return f"{stem}_h{self.head}" if self.kind == "decay" else stem
        return f"{self.kind}_state_{self.layer}" if self.is_state else f"past_{self.kind}_{self.layer}_h{self.head}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """A cache of `layers x 2 x kv_heads` tensors of `head_dim` columns for a context of S tokens.

    States of short convolutions are the case of one tensor a layer: rows of all H channels, in a context of K tokens.

    Attributes:
        layers: decoder layers.
        kv_heads: key/value heads of a layer; 1 for states, but for decays.
        head_dim: D, elements of one head's row; all channels for states.
        context: the tokens that a token attends to, including itself: S of the largest graphs, or the smaller window of
            these layers, or the kernel K of a convolution; at least 2. Of a gated delta rule, 1 more than the rows of
            a tail or of S.
        kv_dtype: `u8` (zero point 128), `s8` or `s16` (zero point 0); of states also `u16` (zero point 32768).
        key_layout: how graphs read and write keys: `rows` `[1, 1, S-AR, D]` as values, or `columns`
            `[1, 1, D, S-AR]`, as Genie requires. Values are always rows.
        numbers: the numbers of these layers in the model; empty for all, from 0 on.
        kinds: the tensors of a layer and head.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    kv_dtype: KvDtype = "u8"
    key_layout: KeyLayout = "rows"
    numbers: tuple[int, ...] = ()
    kinds: tuple[Kind, ...] = KINDS

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected at least 1")
        if self.context < 2:
            raise ValueError(f"context: got {self.context}; expected at least 2 tokens")
        if self.kv_dtype not in _ELEMENT_BYTES:
            raise ValueError(f"kv_dtype: got {self.kv_dtype!r}; expected one of {', '.join(_ELEMENT_BYTES)}")
        if self.kv_dtype == "u16" and not self.is_state:
            raise ValueError("kv_dtype: got 'u16' of keys and values; expected u8, s8 or s16")
        if self.key_layout not in ("rows", "columns"):
            raise ValueError(f"key_layout: got {self.key_layout!r}; expected rows or columns")
        if self.numbers and (len(self.numbers) != self.layers or min(self.numbers) < 0):
            raise ValueError(f"numbers: got {self.numbers}; expected those of {self.layers} layers, from 0 on")
        heads = self.kv_heads if self.kinds in (KINDS, ("decay",)) else 1
        if self.kinds not in (KINDS, STATE_KINDS, *((kind,) for kind in DELTA_KINDS)) or self.kv_heads != heads:
            raise ValueError(
                f"kinds: got {self.kinds} of {self.kv_heads} heads; expected keys and values, or one state"
            )

    @property
    def is_state(self) -> bool:
        """Whether the tensors are states, so that these layers have no attention."""
        return self.kinds != KINDS

    @property
    def is_delta(self) -> bool:
        """Whether the tensors are of a gated delta rule: rows since a checkpoint, or its matrices S."""
        return self.kinds[0] in DELTA_KINDS

    @property
    def tensors(self) -> int:
        """N = layers x 2 x kv_heads; one for each layer with a state."""
        return self.layers * len(self.kinds) * self.kv_heads

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self.kv_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one tensor."""
        return self.head_dim * self.element_bytes

    @property
    def zero_point(self) -> int:
        """The integer that represents 0.0, which fills unused rows."""
        return ZERO_POINTS[self.kv_dtype]

    def past_rows(self, ar: int, context: int | None = None) -> int:
        """The rows that a graph for AR new tokens reads of each tensor.

        S-AR, or the W-1 rows that the first new token attends to if these layers' window is smaller. States have K-1
        rows, whatever AR is: those of the kernel, of the tail, or of a matrix S.

        Args:
            ar: tokens per inference.
            context: S of the graph; None for the context of this geometry.
        """
        if self.is_state:
            return self.context - 1
        if not 1 <= ar < min(self.context, context or self.context):
            least = min(self.context, context or self.context)
            raise ValueError(f"ar: got {ar}; expected 1 to {least - 1}, below the context of {least}")
        return min(self.context - 1, (context or self.context) - ar)

    def groups(self) -> tuple[Geometry, ...]:
        """Groups of equal layers: one with all layers; see `LayeredGeometry`."""
        return (self,)

    def names(self) -> Iterator[KvTensor]:
        """All tensors in the order of the arena: by layer, keys before values, by head."""
        for layer in self.numbers or range(self.layers):
            for kind in self.kinds:
                for head in range(self.kv_heads):
                    yield KvTensor(layer, kind, head)
