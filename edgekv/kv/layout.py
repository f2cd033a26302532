"""Where each tensor lies in the one allocation of a cache, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgekv.kv.memory import ALIGNMENT_BYTES
from edgekv.kv.strategy import Strategy
from edgekv.spec.geometry import KINDS, Geometry, Kind, KvTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of `rows` rows, then as many scratch tensors of `scratch_rows` rows, each on a 64-byte boundary.

    Attributes:
        geometry: the sizes of the cache.
        rows: rows of each tensor; at least 1.
        scratch_rows: rows of each scratch tensor, or 0 for none.
        mirrored: whether each tensor is a ring of whole pages that is mapped twice; then there is no scratch.
        kinds: which tensors of the geometry.
    """

    geometry: Geometry
    rows: int
    scratch_rows: int = 0
    mirrored: bool = False
    kinds: tuple[Kind, ...] = KINDS

    def __post_init__(self) -> None:
        if self.rows < 1 or self.scratch_rows < 0 or (self.mirrored and self.scratch_rows):
            raise ValueError(f"layout: got {self}; expected rows >= 1 and scratch_rows >= 0, 0 if mirrored")

    @classmethod
    def of(cls, geometry: Geometry, strategy: Strategy, kinds: tuple[Kind, ...] = KINDS) -> Layout:
        """The layout that a strategy asks for."""
        return cls(geometry, strategy.rows, strategy.scratch_rows, strategy.mirrored, kinds)

    @property
    def tensors(self) -> int:
        """How many: N, or half of it for keys or values alone."""
        return self.geometry.tensors // len(KINDS) * len(self.kinds)

    def names(self) -> Iterator[KvTensor]:
        """The tensors in their order: that of the geometry."""
        return (tensor for tensor in self.geometry.names() if tensor.kind in self.kinds)

    @property
    def reach_rows(self) -> int:
        """Rows that can be addressed in each tensor: each row twice if it is mirrored."""
        return 2 * self.rows if self.mirrored else self.rows

    @property
    def stride_bytes(self) -> int:
        """From one tensor to the next, as addresses count."""
        return aligned(self.reach_rows * self.geometry.row_bytes)

    @property
    def scratch_stride_bytes(self) -> int:
        """From one scratch tensor to the next."""
        return aligned(self.scratch_rows * self.geometry.row_bytes)

    @property
    def scratch_offset_bytes(self) -> int:
        """From the first tensor to the first scratch tensor."""
        return self.tensors * self.stride_bytes

    @property
    def allocated_bytes(self) -> int:
        """What is allocated: all tensors, and the slack that brings the first one onto a boundary."""
        if self.mirrored:
            return self.tensors * self.rows * self.geometry.row_bytes
        return self.tensors * (self.stride_bytes + self.scratch_stride_bytes) + ALIGNMENT_BYTES


def aligned(size_bytes: int) -> int:
    """Rounded up to whole boundaries."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
