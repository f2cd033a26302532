"""One block: the keys and values of some tokens in one group of layers, or the states after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgekv.prefix.keys import Link
from edgekv.prefix.retention import DEFAULT_PRIORITY

SNAPSHOT = -1
ROWS = "rows"

Arrays = Mapping[str, NDArray[Any]]
BlockId = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class Block:
    """A block in memory.

    Attributes:
        link: its key, its parent and its own tokens.
        part: number of the group of layers whose rows it has; `SNAPSHOT` for the states after its last token.
        chained: whether it is of use only with the blocks before it, as rows of full attention are.
        arrays: `rows`, `[tensors, tokens, D]`; or the named arrays of a snapshot.
        priority: 0 to 100.
        expires_ms: when the priority returns to the default; None for never.
        used: last use: ns since the epoch, strictly increasing. Parents are touched after their children.
        is_saved: whether it has been written to the folder, or read from it.
    """

    link: Link
    part: int
    chained: bool
    arrays: Arrays
    priority: int = DEFAULT_PRIORITY
    expires_ms: int | None = None
    used: int = 0
    is_saved: bool = False

    @property
    def id(self) -> BlockId:
        """Its name, in memory and on disk."""
        return self.link.key, self.part

    @property
    def parent(self) -> BlockId:
        """The block that it follows."""
        return self.link.parent, self.part

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def lasting_priority(self) -> int:
        """The priority on disk: one that expires is not visible to other processes."""
        return self.priority if self.expires_ms is None else DEFAULT_PRIORITY
