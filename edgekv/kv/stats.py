"""What a cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.kv.policies.rotation import Requantization


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counted from the construction of the cache on; neither `reset` nor `rewind` takes anything back.

    Attributes:
        bytes_copied: bytes that the cache itself has copied, of all tensors; rows that a graph writes in place
            are not copied, and keys that a policy rotates are counted below.
        copies: copies of one range of rows in all tensors: slides of a pointer-shift, writes of a slot, moves of a
            group of layers to larger memory.
        steps: steps committed.
        tokens: tokens committed.
        bytes_held: bytes allocated, scratch and alignment included.
        peak_bytes: the most that ever were; more than `bytes_held` if memory grew.
        reallocations: how often the memory of a layer was replaced by a larger one.
        evicted: tokens that left because a policy chose them, other than the oldest of a sliding window.
        requantization: what rotating keys to other positions has cost, if the policy does so.
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
