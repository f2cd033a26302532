"""Blocks of the store that a request uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.prefix.block import Block, Tier


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of one group that a request holds, from block `first` of its sequence on."""

    first: int
    blocks: tuple[Block, ...]


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks that a request uses: one span for each group.

    Attributes:
        tokens: length of the prefix that the spans cover.
        spans: one for each group.
    """

    tokens: int = 0
    spans: tuple[Span, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Reuse:
    """How a match may end within a block.

    Attributes:
        partial: whether it may.
        copy: whether the block is copied: it may be in use and stays available.
    """

    partial: bool
    copy: bool


class Match:
    """The stored prefix of a sequence. Its blocks are retained until `PrefixStore.release`.

    Attributes:
        tokens: length of the prefix found.
    """

    __slots__ = ("_key", "_lease", "_released")

    def __init__(self, key: bytes, lease: Lease) -> None:
        self._key = key
        self._lease = lease
        self._released = False

    @property
    def tokens(self) -> int:
        return self._lease.tokens

    def block_ids(self, group: int = 0) -> list[int]:
        """Ids of a group's blocks in primary memory; with a limited window, only those within it."""
        return [block.places[Tier.PRIMARY] for block in self._lease.spans[group].blocks] if self._lease.spans else []

    def check_held(self) -> None:
        """Raise ValueError if it was released."""
        if self._released:
            raise ValueError("match: got one that was released; expected one that is held")
