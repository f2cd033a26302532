"""Statistics of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.kv.policies.rotation import Requantization


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was created; `reset` and `rewind` subtract nothing.

    Attributes:
        bytes_copied: bytes that the cache itself has copied, of all tensors; rows that a graph writes in place
            are not copied, and keys that a policy rotates are counted below.
        copies: copies of one range of rows in all tensors: slides of a pointer-shift, writes of a slot, moves of a
            group of layers to larger memory.
        steps: steps committed.
        tokens: tokens committed.
        bytes_held: bytes allocated, including scratch and alignment.
        peak_bytes: maximum bytes allocated; more than `bytes_held` if memory grew.
        reallocations: how often the memory of a layer was replaced by a larger one.
        evicted: tokens that the policy evicted from the layers that attend to the whole context.
        requantization: rounding error of rotating keys, if the policy does so.
    """

    bytes_copied: int
    copies: int
    steps: int
    tokens: int
    bytes_held: int
    peak_bytes: int
    reallocations: int = 0
    evicted: int = 0
    requantization: Requantization | None = None
