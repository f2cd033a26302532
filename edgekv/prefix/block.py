"""One cached block: where its bytes are and how dear it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from edgekv.prefix.retention import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from edgekv.prefix.tree import Node

ABSENT = -1


class Tier(IntEnum):
    """Where bytes are, the dearest first."""

    PRIMARY = 0
    HOST = 1
    DISK = 2


MEMORY = (Tier.PRIMARY, Tier.HOST)


@dataclass(slots=True, eq=False)
class Block:
    """The keys and values of one group for the tokens of one node.

    It is in the primary or in the host memory or in neither, and a file of it may be on the disk beside that.

    Attributes:
        node: its place in the tree.
        group: index of the group.
        priority: 0 to 100.
        expires_ms: when the priority becomes the default again; None is never.
        stamp: grows with each use.
        guards: operations under way that need it; no tier evicts it meanwhile.
        places: of each tier, the id in memory or the bytes of the file; `ABSENT` if it is not there.
        following: of each tier, how many of the blocks that follow it are there; counted for full attention alone.
    """

    node: Node
    group: int
    priority: int = DEFAULT_PRIORITY
    expires_ms: int | None = None
    stamp: int = 0
    guards: int = 0
    places: list[int] = field(default_factory=lambda: [ABSENT, ABSENT, ABSENT])
    following: list[int] = field(default_factory=lambda: [0, 0, 0])

    def is_in(self, tier: Tier) -> bool:
        return self.places[tier] != ABSENT

    @property
    def is_nowhere(self) -> bool:
        return self.places == [ABSENT, ABSENT, ABSENT]
