"""Blocks, in memory and as files: rows of some tokens in one group of layers, or the states after them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import monotonic_ns, time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors
from edgekv.prefix.keys import Keys, Link
from edgekv.prefix.retention import DEFAULT_PRIORITY, Retention

FORMAT = 3  # of the files, and of the table that names them
_FORMAT_NAME = f"edgekv-prefix-{FORMAT}"
SNAPSHOT = -1
ROWS = "rows"

Arrays = Mapping[str, NDArray[Any]]
BlockId = tuple[bytes, int]
IsPinned = Callable[[BlockId], bool]
_MIN_HEAP = 64


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
        size_bytes: bytes of its arrays.
    """

    link: Link
    part: int
    chained: bool
    arrays: Arrays
    priority: int = DEFAULT_PRIORITY
    expires_ms: int | None = None
    used: int = 0
    is_saved: bool = False
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(array.nbytes for array in self.arrays.values())

    @property
    def id(self) -> BlockId:
        """Its name, in memory and on disk."""
        return self.link.key, self.part

    @property
    def parent(self) -> BlockId:
        """The block that it follows."""
        return self.link.parent, self.part

    @property
    def lasting_priority(self) -> int:
        """The priority on disk: one that expires is not visible to other processes."""
        return self.priority if self.expires_ms is None else DEFAULT_PRIORITY


class Memory:
    """Blocks by key and part, within a budget of bytes.

    The lowest priority is evicted first, then the least recently used; a chained block never before the blocks that
    follow it.

    Attributes:
        budget_bytes: bytes of all blocks.
        bytes_held: bytes in use.
    """

    def __init__(self, budget_bytes: int, clock_ms: Callable[[], int], last_used: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_held = 0
        self._clock_ms = clock_ms
        self._used = last_used  # all later uses are later, even if the clock was set back since
        self._blocks: dict[BlockId, Block] = {}
        self._children: dict[BlockId, list[bytes]] = {}  # the tokens of the blocks after each, sorted
        # An evictable block has an entry with its priority and last use, or earlier ones; see `evict`.
        self._heap: list[tuple[int, int, BlockId]] = []
        self._expiring: list[tuple[int, BlockId]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, id: BlockId) -> Block | None:
        return self._blocks.get(id)

    def neighbours(self, parent: BlockId, tokens: bytes) -> list[bytes]:
        """The tokens of the blocks after a parent that sort just before `tokens`, and not before it.

        No other one has a longer common prefix with `tokens`.
        """
        children = self.children(parent)
        place = bisect_left(children, tokens)
        return children[max(place - 1, 0) : place + 1]

    def children(self, parent: BlockId) -> list[bytes]:
        """The tokens of all blocks after a parent, sorted."""
        return self._children.get(parent, [])

    def add(self, block: Block) -> None:
        """Add a block; the caller has made room."""
        self.touch((block,))
        insort(self._children.setdefault(block.parent, []), block.link.tokens)
        self._push(block)
        self._blocks[block.id] = block
        self.bytes_held += block.size_bytes

    def remove(self, id: BlockId) -> None:
        """Remove a block, if it is there."""
        block = self._blocks.pop(id, None)
        if block is None:
            return
        self.bytes_held -= block.size_bytes
        children = self._children[block.parent]
        del children[bisect_left(children, block.link.tokens)]
        if not children:
            del self._children[block.parent]

    def evict(self, is_pinned: IsPinned) -> Block | None:
        """Remove and return the first block of the order that is not pinned; None if there is none."""
        skipped = []
        try:
            while self._heap:
                priority, used, id = entry = heappop(self._heap)
                block = self._blocks.get(id)
                if block is None or (priority, used) > (block.priority, block.used):
                    continue  # removed, or entered again when its priority was lowered
                if (priority, used) < (block.priority, block.used):
                    self._push(block)
                elif is_pinned(id) or (block.chained and id in self._children):
                    skipped.append(entry)
                else:
                    self.remove(id)
                    return block
            return None
        finally:
            for entry in skipped:
                heappush(self._heap, entry)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Make blocks the most recently used ones, the last of them most of all."""
        for used, block in enumerate(blocks, max(self._used + 1, time_ns())):
            self._used = block.used = used

    def retain(self, block: Block, retention: Retention) -> None:
        block.expires_ms = None if retention.duration_ms is None else self._clock_ms() + retention.duration_ms
        if block.expires_ms is not None:
            heappush(self._expiring, (block.expires_ms, block.id))
        self._set_priority(block, retention.priority)

    def expire(self) -> None:
        """Reset priorities whose time is over to the default."""
        while self._expiring and self._expiring[0][0] <= self._clock_ms():
            expires_ms, id = heappop(self._expiring)
            block = self._blocks.get(id)
            if block is not None and block.expires_ms == expires_ms:
                block.expires_ms = None
                self._set_priority(block, DEFAULT_PRIORITY)

    def _set_priority(self, block: Block, priority: int) -> None:
        is_lower, block.priority = priority < block.priority, priority
        if is_lower:
            self._push(block)

    def _push(self, block: Block) -> None:
        if len(self._heap) > max(_MIN_HEAP, 2 * len(self._blocks)):
            self._heap = [(block.priority, block.used, block.id) for block in self._blocks.values()]
            heapify(self._heap)
        heappush(self._heap, (block.priority, block.used, block.id))


def encode_block(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    """The content of a block's file."""
    return encode_tensors(arrays, {"format": _FORMAT_NAME, "checksum": _checksum(id, arrays, keys).hex()})


def decode_block(id: BlockId, content: bytes, keys: Keys) -> Arrays | None:
    """The arrays of a block, which share the memory of `content`.

    None if the file is truncated, changed, of another block, or was written with another secret.
    """
    try:
        file = decode_tensors(content)
    except TensorFileError:
        return None
    metadata = {"format": _FORMAT_NAME, "checksum": _checksum(id, file.arrays, keys).hex()}
    return file.arrays if file.metadata == metadata else None


def _checksum(id: BlockId, arrays: Arrays, keys: Keys) -> bytes:
    key, part = id
    parts: list[bytes | memoryview] = [_FORMAT_NAME.encode(), key, str(part).encode()]
    for name, array in sorted(arrays.items()):
        parts += [
            repr((name, array.dtype.str, array.shape)).encode(),
            np.ascontiguousarray(array).reshape(-1).data.cast("B"),
        ]
    return keys.digest(b"checksum", *parts)


def now_ms() -> int:
    """A monotonic clock in milliseconds."""
    return monotonic_ns() // 1_000_000
