"""One block of tokens: its place in a sequence, where its bytes are, and its priority."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from edgekv.prefix.retention import DEFAULT_PRIORITY

Tokens = tuple[int, ...]

ABSENT = -1


class Tier(IntEnum):
    """Where bytes are, fastest first."""

    PRIMARY = 0
    HOST = 1
    DISK = 2


MEMORY = (Tier.PRIMARY, Tier.HOST)


@dataclass(slots=True, eq=False)
class Block:
    """The keys and values of one group for the tokens of one node.

    It is in primary or host memory or in neither, and may have a file on the disk as well.

    Attributes:
        node: its place in the tree.
        group: index of the group.
        priority: 0 to 100.
        expires_ms: time at which the priority returns to the default; None for never.
        stamp: grows with each use.
        used_ns: time of the last use, ns since the epoch; comparable between processes.
        guards: number of running operations that need it; it is not evicted while above 0.
        places: for each tier, the memory id or the file's size in bytes; `ABSENT` if the block is not there.
        following: for each tier, the number of child blocks that are there; full attention only.
    """

    node: Node
    group: int
    priority: int = DEFAULT_PRIORITY
    expires_ms: int | None = None
    stamp: int = 0
    used_ns: int = 0
    guards: int = 0
    places: list[int] = field(default_factory=lambda: [ABSENT, ABSENT, ABSENT])
    following: list[int] = field(default_factory=lambda: [0, 0, 0])

    def is_in(self, tier: Tier) -> bool:
        return self.places[tier] != ABSENT

    @property
    def is_nowhere(self) -> bool:
        return self.places == [ABSENT, ABSENT, ABSENT]


class Node:
    """One block of tokens; its parents hold the tokens before it.

    Attributes:
        parent: None for a root.
        tokens: `tokens_per_block` of them, or fewer at the end of a sequence, which has no children; none for
            a root.
        blocks: for each group, its block or None.
        children: child nodes, by their tokens.
        order: the tokens of the children, sorted: the longest common prefix is adjacent to a query's insertion point.
    """

    __slots__ = ("blocks", "children", "order", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[Block | None] = [None] * groups
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []

    @property
    def is_empty(self) -> bool:
        """Whether the node has neither blocks nor children."""
        return not self.children and not any(self.blocks)

    def subtree(self) -> list[Node]:
        """The node and its descendants, parents first."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def path(self) -> list[Node]:
        """From the root to this node, both included."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]
