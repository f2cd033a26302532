"""What is sized: a geometry, the graphs that share it, and what is known of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import UsageError
from edgekv.kv import Geometry, KvDtype
from edgekv.spec.sizes import Decoder

DEFAULT_AR = (1, 32)
# Strategies are counted by letting them run: beyond a few seconds of that, nobody has a graph.
MOST_CONTEXT = 1 << 20
_KV_DTYPES: dict[int, KvDtype] = {8: "u8", 16: "s16"}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What was given as options; None for what was not.

    Attributes:
        layers: decoder layers.
        kv_heads: key/value heads of a layer.
        head_dim: D.
        context: S, tokens.
        kv_bits: bits of a cache element, 8 or 16.
        ar: tokens per inference of each graph.
        recipe: one of `WEIGHT_DTYPES`, of a model that is no bundle yet.
    """

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    context: int | None = None
    kv_bits: int | None = None
    ar: tuple[int, ...] | None = None
    recipe: str = "w8a16"


@dataclass(frozen=True, slots=True)
class Subject:
    """A cache to size.

    Attributes:
        source: where the sizes are from, for readers.
        geometry: the sizes.
        ar: tokens per inference of each graph, ascending; 1 is among them, all are below the context.
        weights_bytes: bytes of the weights beside the cache, or None if they are unknown.
        max_positions: the longest context that the model was made for, or None if it is unknown.
        assumptions: what was not given and taken to be so, one sentence each.
        decoder: all sizes of the model, or None if they are unknown.
    """

    source: str
    geometry: Geometry
    ar: tuple[int, ...]
    weights_bytes: int | None
    max_positions: int | None
    assumptions: tuple[str, ...]
    decoder: Decoder | None = None

    def __post_init__(self) -> None:
        if self.ar != tuple(sorted(set(self.ar))) or not self.ar or self.ar[0] != 1:
            raise ValueError(f"ar: got {self.ar}; expected 1 and larger numbers, ascending")
        self.geometry.past_rows(self.ar[-1])


def kv_dtype_of(bits: int) -> KvDtype:
    """The integer type of a cache of so many bits.

    Raises:
        UsageError: neither 8 nor 16.
    """
    dtype = _KV_DTYPES.get(bits)
    if dtype is None:
        raise UsageError("--kv-bits", got=bits, expected="8 (u8) or 16 (s16)", fix="Use --kv-bits 8.")
    return dtype


def checked_ar(ar: tuple[int, ...], context: int) -> tuple[int, ...]:
    """The AR numbers, ascending and each once.

    Raises:
        UsageError: 1 is not among them, or one is not below the context.
    """
    listed = ",".join(map(str, ar))
    if 1 not in ar or min(ar) < 1:
        wanted = "1 and larger numbers, such as 1,32"
        raise UsageError("--ar", got=listed, expected=wanted, fix="Add 1: it decodes.")
    if max(ar) >= context:
        raise UsageError(
            "--ar",
            got=f"{max(ar)} with a context of {context}",
            expected="numbers below the context",
            fix="Use a smaller --ar or a larger --context.",
        )
    return tuple(sorted(set(ar)))
