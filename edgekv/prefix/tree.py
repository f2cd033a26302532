"""A radix tree whose edges are blocks of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from edgekv.prefix.block import Block, Node, Tokens


class Root(Node):
    """The root of the sequences of one salt.

    Attributes:
        key: keyed hash of the salt.
    """

    __slots__ = ("key",)

    def __init__(self, key: bytes, groups: int) -> None:
        super().__init__(None, (), groups)
        self.key = key


class Tree:
    """One tree for each salt.

    Attributes:
        roots: non-empty roots by key.
    """

    def __init__(self, tokens_per_block: int, groups: int) -> None:
        self.roots: dict[bytes, Root] = {}
        self._step = tokens_per_block
        self._groups = groups

    def root(self, key: bytes) -> Root:
        """The root of a key; a new one is not in the tree before `attach`."""
        return self.roots.get(key) or Root(key, self._groups)

    def blocks(self) -> Iterator[Block]:
        """The blocks of all nodes."""
        for root in self.roots.values():
            for node in root.subtree():
                yield from (block for block in node.blocks if block is not None)

    def walk(self, root: Root, tokens: Tokens) -> list[Node]:
        """The nodes of all full blocks that `tokens` starts with."""
        nodes: list[Node] = []
        node: Node = root
        for start in range(0, len(tokens) - self._step + 1, self._step):
            child = node.children.get(tokens[start : start + self._step])
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def nearest(self, node: Node, tokens: Tokens) -> Iterator[tuple[Node, int]]:
        """Children with a common prefix, and its length, longest first."""
        right = bisect_left(node.order, tokens)
        left = right - 1
        left_tokens, right_tokens = _common(node.order, left, tokens), _common(node.order, right, tokens)
        while left_tokens or right_tokens:
            if right_tokens >= left_tokens:
                yield node.children[node.order[right]], right_tokens
                right += 1
                right_tokens = _common(node.order, right, tokens)
            else:
                yield node.children[node.order[left]], left_tokens
                left -= 1
                left_tokens = _common(node.order, left, tokens)

    def left(self, node: Node) -> Node | None:
        """The node before this one in the sorted order of the parent's children."""
        parent = node.parent
        if parent is None:
            return None
        place = bisect_left(parent.order, node.tokens)
        return parent.children[parent.order[place - 1]] if place else None

    def child(self, node: Node, tokens: Tokens) -> Node:
        """The child of these tokens; a new one is not in the tree before `attach`."""
        return node.children.get(tokens) or Node(node, tokens, self._groups)

    def attach(self, node: Node) -> None:
        """Put a node into the tree, with the parents that were pruned since the node was made."""
        while (parent := node.parent) is not None:
            if node.tokens in parent.children:
                return
            parent.children[node.tokens] = node
            insort(parent.order, node.tokens)
            node = parent
        assert isinstance(node, Root)
        self.roots[node.key] = node

    def prune(self, node: Node) -> None:
        """Remove a node if it is empty, and parents that become empty."""
        while node.is_empty:
            parent = node.parent
            if parent is None:
                assert isinstance(node, Root)
                self.roots.pop(node.key, None)
                return
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
                del parent.order[bisect_left(parent.order, node.tokens)]
            node = parent


def _common(order: list[Tokens], place: int, tokens: Tokens) -> int:
    """Length of the common prefix with the entry at an index; 0 if out of range."""
    if not 0 <= place < len(order):
        return 0
    for count, (one, other) in enumerate(zip(order[place], tokens, strict=False)):
        if one != other:
            return count
    return min(len(order[place]), len(tokens))


def common_tokens(tokens: Tokens, sequences: Iterable[Tokens]) -> int:
    """Length of the longest prefix that a sequence shares with any of the others."""
    return max((_common([each], 0, tokens) for each in sequences), default=0)
