"""Several continuations of a text, with common beginnings shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

LATER = 3
"""Tokens by which a less likely continuation stands back behind a more likely one."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts that may branch. The first of them are the most likely: without the last ones it is a tree as well.

    Attributes:
        tokens: of the nodes.
        parents: index of the node before each, lower than its own; -1 for the text.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or any(not -1 <= p < at for at, p in enumerate(self.parents)):
            raise ValueError(f"draft tree: got {self}; expected a lower index for the parent of each token, or -1")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """One continuation."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def of(cls, chains: Sequence[Sequence[int]], most: int) -> DraftTree:
        """The most likely nodes of several continuations, at most `most`; the likeliest continuation is first.

        The token at depth d of continuation j comes with that at depth d + 3 of continuation j - 1.
        """
        due = sorted((depth + LATER * j, j, depth) for j, chain in enumerate(chains) for depth in range(len(chain)))
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        ends = [-1] * len(chains)  # node of the last token of each so far
        for _, j, depth in due:
            key = ends[j], chains[j][depth]
            if key not in nodes:
                if len(tokens) == most:
                    break
                nodes[key] = len(tokens)
                parents.append(key[0])
                tokens.append(key[1])
            ends[j] = nodes[key]
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether nothing branches, and each token follows the one before it."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depth(self) -> int:
        """Tokens of the longest continuation."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def first(self, nodes: int) -> DraftTree:
        """The first nodes, `nodes` at most."""
        return self if nodes >= len(self) else DraftTree(self.tokens[:nodes], self.parents[:nodes])

    def within(self, vocab: int) -> DraftTree:
        """The nodes before the first whose token is no id of a vocabulary."""
        outside = (at for at, token in enumerate(self.tokens) if not 0 <= token < vocab)
        return self.first(next(outside, len(self)))

    def child(self, node: int, token: int) -> int | None:
        """The node of a token that follows a node, or the text; None if there is none."""
        for at in range(node + 1, len(self.tokens)):
            if self.tokens[at] == token and self.parents[at] == node:
                return at
        return None

    def path(self, tokens: Sequence[int], node: int = -1) -> list[int]:
        """The nodes of the tokens that follow a node, or the text, as far as there are any."""
        nodes: list[int] = []
        for token in tokens:
            after = self.child(node, token)
            if after is None:
                break
            node = after
            nodes.append(node)
        return nodes

    def continues(self, node: int) -> bool:
        """Whether there is a draft behind a node, or behind the text."""
        return node in self.parents

    @property
    def trunk_nodes(self) -> list[int]:
        """The nodes of the most likely continuation."""
        nodes: list[int] = []
        for at, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else -1):
                nodes.append(at)
        return nodes

    def trunk(self) -> DraftTree:
        """The most likely continuation alone."""
        return self if self.is_chain else DraftTree.chain([self.tokens[node] for node in self.trunk_nodes])


def as_tree(draft: Sequence[int] | DraftTree) -> DraftTree:
    """A draft as a tree, which has one branch if the draft is a sequence.

    Raises:
        TypeError: it is neither, or something in it is no whole number.
    """
    if isinstance(draft, DraftTree):
        return DraftTree(tuple(map(index, draft.tokens)), draft.parents)
    return DraftTree.chain([index(token) for token in draft])
