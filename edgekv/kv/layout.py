"""Where each tensor lies in the one allocation of a cache, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.kv.geometry import Geometry
from edgekv.kv.strategy import Strategy

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """N tensors of `rows` rows, then N scratch tensors of `scratch_rows` rows, each on a 64-byte boundary.

    Attributes:
        geometry: the sizes of the cache.
        rows: rows of each tensor; at least 1.
        scratch_rows: rows of each scratch tensor, or 0 for none.
    """

    geometry: Geometry
    rows: int
    scratch_rows: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.scratch_rows < 0:
            raise ValueError(f"layout: found {self}; wanted rows >= 1 and scratch_rows >= 0")

    @classmethod
    def of(cls, geometry: Geometry, strategy: Strategy) -> Layout:
        """The layout that a strategy asks for."""
        return cls(geometry, strategy.rows, strategy.scratch_rows)

    @property
    def stride_bytes(self) -> int:
        """From one tensor to the next."""
        return _aligned(self.rows * self.geometry.row_bytes)

    @property
    def scratch_stride_bytes(self) -> int:
        """From one scratch tensor to the next."""
        return _aligned(self.scratch_rows * self.geometry.row_bytes)

    @property
    def scratch_offset_bytes(self) -> int:
        """From the first tensor to the first scratch tensor."""
        return self.geometry.tensors * self.stride_bytes

    @property
    def allocated_bytes(self) -> int:
        """What is allocated: all tensors, and the slack that brings the first one onto a boundary."""
        tensors_bytes = self.geometry.tensors * (self.stride_bytes + self.scratch_stride_bytes)
        return tensors_bytes + ALIGNMENT_BYTES


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
