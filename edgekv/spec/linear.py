"""Layers with a gated delta rule in place of attention (arXiv 2412.06464): sizes, and the kinds of what they keep."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edgekv.spec.geometry import KvDtype

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=1 << 12)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class DeltaRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose heads keep a matrix S `[key_dim, value_dim]`, decayed and corrected by every token.

    With a key k of length 1, a value v, a strength b and a decay g: `S <- exp(g) S`; `d = b (v - S^T k)`;
    `S <- S + k d^T`; the result is `S^T q`. Keys, queries and values first pass a causal convolution and SiLU.

    Attributes:
        layers: their numbers.
        kernel: K, the tokens that the convolution reads, including the current one.
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with a matrix; consecutive ones share a key head.
        key_dim: elements of a head of queries or keys.
        value_dim: elements of a head of values.
        state_dtype: integer type of the rows that the convolution reads. Set by export.
    """

    layers: frozenset[_Layer]
    kernel: Annotated[int, msgspec.Meta(ge=2, le=1 << 10)]
    key_heads: _Heads
    value_heads: _Heads
    key_dim: _Width
    value_dim: _Width
    state_dtype: KvDtype = "u16"

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: got {self.value_heads}; expected a multiple of {self.key_heads} key heads")

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
