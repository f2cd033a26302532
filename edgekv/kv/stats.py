"""What a cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counted from the construction of the cache on; neither `reset` nor `rewind` takes anything back.

    Attributes:
        bytes_copied: bytes that the cache itself has copied, of all tensors; rows that a graph writes in place
            are not copied.
        copies: copies of one range of rows in all tensors: slides of a pointer-shift, writes of a slot.
        steps: steps committed.
        tokens: tokens committed.
        bytes_held: bytes allocated, scratch and alignment included.
    """

    bytes_copied: int
    copies: int
    steps: int
    tokens: int
    bytes_held: int
