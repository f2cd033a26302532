"""Layers with a gated delta rule (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060) in place of attention."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgekv.spec.geometry import KvDtype

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=1 << 12)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Step = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class DeltaRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose heads keep a matrix S `[key_dim, value_dim]`, decayed and corrected by every token.

    With a key k of length 1, a value v, a strength b and a decay g: `S <- exp(g) S`; `d = b (v - S^T k)`;
    `S <- S + k d^T`; the result is `S^T q`. Keys, queries and values first pass a causal convolution and SiLU.

    Mamba-2 corrects nothing: with a rate A below 0 and a step t of each token, `g = t A`, `d = t v`, and the result is
    `S^T q + D v`. Its B is k, its C is q, neither divided by its length, and its x is v.

    Attributes:
        layers: their numbers.
        kernel: K, the tokens that the convolution reads, including the current one.
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with a matrix; consecutive ones share a key head.
        key_dim: elements of a head of queries or keys.
        value_dim: elements of a head of values.
        state_dtype: integer type of the rows that the convolution reads. Set by export.
        corrects: whether d depends on S; without, this is Mamba-2, and S and what is cached are in other units:
            `S <- exp(g) S + g k v^T`, whose result is divided by A. A head whose steps are small has values as large as
            those of others.
        kernel_bias: whether the convolution has a bias.
        step_limits: the shortest and the longest step of Mamba-2; None for no limit.
        attends: whether its layers have attention too, which reads the same input and is added to the same residual.
        norm: of the results of Mamba-2 over the heads of each group: `gated`, behind their gate; `first`, in front of
            it; or None.
    """

    layers: frozenset[_Layer]
    kernel: Annotated[int, msgspec.Meta(ge=2, le=1 << 10)]
    key_heads: _Heads
    value_heads: _Heads
    key_dim: _Width
    value_dim: _Width
    state_dtype: KvDtype = "u16"
    corrects: bool = True
    kernel_bias: bool = False
    step_limits: tuple[_Step, _Step | None] = (0.0, None)
    attends: bool = False
    norm: Literal["gated", "first"] | None = "gated"

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: got {self.value_heads}; expected a multiple of {self.key_heads} key heads")

    @property
    def noun(self) -> str:
        """What such layers have, in messages."""
        return "gated delta rules" if self.corrects else "Mamba-2 states"

    @property
    def keys(self) -> int:
        """Channels of all keys, or of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads
