"""Longest match, insertion and release of sequences. Integers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from edgekv.prefix.block import Block, Node, Tier, Tokens
from edgekv.prefix.groups import BlockGroup
from edgekv.prefix.lease import Lease, Reuse, Span
from edgekv.prefix.retention import Retention
from edgekv.prefix.stats import Counters
from edgekv.prefix.tiers import Tiers
from edgekv.prefix.tree import Root, Tree

Write = Callable[[int, int, int, int], None]


class Index:
    """Combines the tree and the tiers."""

    def __init__(
        self, tree: Tree, tiers: Tiers, groups: Sequence[BlockGroup], step: int, reuse: Reuse, counters: Counters
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._references = tiers.references
        self._groups = groups
        self._step = step
        self._reuse = reuse
        self._counters = counters
        # A node has at least one block, so a single group of full attention has no gaps.
        alone = len(groups) == 1 and groups[0].window is None
        self._checked: Sequence[int] = () if alone else range(len(groups))

    def match(self, key: bytes, tokens: Tokens) -> Lease:
        """Find and retain the longest prefix of a sequence that every group has."""
        self._tiers.recency.expire()
        root = self._tree.root(key)
        nodes = self._tree.walk(root, tokens)
        whole = upper = len(nodes) * self._step
        partial = self._partial(nodes[-1] if nodes else root, tokens[whole : whole + self._step])
        if partial is not None:
            nodes.append(partial[0])
            upper += partial[1]
        lease = self._hold(nodes, upper)
        if lease.tokens % self._step and not self._reuse.copy:
            self._take_over(nodes[-1])
        return lease

    def insert(
        self,
        root: Root,
        tokens: Tokens,
        first: Sequence[int],
        wanted: Callable[[int], Retention | None],
        write: Write,
        *,
        ended: bool = False,
    ) -> list[Node]:
        """Store the missing blocks of a sequence while there is memory.

        Args:
            root: of the sequence's salt.
            tokens: the sequence.
            first: for each group, the first block whose rows the caller has.
            wanted: the retention requested for the block at an index.
            write: writes a block's rows; called with the group, the id in primary memory, the first token and the
                number of tokens.
            ended: also store an incomplete last block, if partial reuse is enabled.

        Returns:
            The stored nodes, from the first block up to the first gap.
        """
        self._tiers.recency.expire()
        nodes: list[Node] = []
        guarded: list[deque[tuple[int, Block]]] = [deque() for _ in self._groups]
        try:
            for index, part in enumerate(self._cut(tokens, ended)):
                self._pass_windows(guarded, index * self._step + len(part))
                parent = nodes[-1] if nodes else root
                node = self._node(parent, part)
                if not self._fill(node, index, first, write):
                    break
                nodes.append(node)
                retention = wanted(index)
                for group, block in enumerate(node.blocks):
                    if block is None:
                        continue
                    self._references.guard([block])
                    guarded[group].append((index, block))
                    self._tiers.recency.touch(block)
                    if retention is not None:
                        self._tiers.recency.retain(block, retention)
            return nodes
        finally:
            for blocks in guarded:
                self._references.unguard(block for _, block in blocks)

    def extend(self, lease: Lease, nodes: list[Node], upper: int) -> None:
        """Make a lease retain the first `upper` tokens of these nodes, except those outside a limited window."""
        held = self._hold(nodes, upper)
        self.release(lease)
        lease.tokens, lease.spans = held.tokens, held.spans

    def release(self, lease: Lease) -> None:
        """Release the blocks of a lease."""
        for span in lease.spans:
            for block in span.blocks:
                self._references.release(block)
        lease.spans = ()

    def usable(self, nodes: list[Node], upper: int) -> int:
        """The number of the first `upper` tokens of a path that every group has."""
        presence = [[node.blocks[i] is not None for node in nodes] for i in self._checked]
        windows = [self._groups[i].window or upper + 1 for i in self._checked]
        return longest_usable(presence, windows, self._step, upper)

    def _hold(self, nodes: list[Node], upper: int) -> Lease:
        """Bring the needed blocks into primary memory and retain them; a missing one shortens the match."""
        guarded = [block for node in nodes for block in node.blocks if block is not None]
        self._references.guard(guarded)
        try:
            while True:
                end = self.usable(nodes, upper)
                spans = tuple(self._span(nodes, group, end) for group in range(len(self._groups)))
                missing = self._bring(spans)
                if missing is None:
                    break
                upper = missing * self._step
            for block in chain.from_iterable(span.blocks for span in spans):
                self._tiers.recency.touch(block)
                self._references.retain(block)
            return Lease(end, spans)
        finally:
            self._references.unguard(guarded)

    def _span(self, nodes: list[Node], group: int, end: int) -> Span:
        first = self._groups[group].first_needed(end) // self._step
        blocks = (node.blocks[group] for node in nodes[first : -(-end // self._step)])
        return Span(first, tuple(block for block in blocks if block is not None))

    def _bring(self, spans: Sequence[Span]) -> int | None:
        """The index of the first block that is not available, or None."""
        missing = None
        for span in spans:
            for index, block in enumerate(span.blocks, span.first):
                if missing is not None and index >= missing:
                    break
                if not self._tiers.bring(block):
                    missing = index
        return missing

    def _cut(self, tokens: Tokens, ended: bool) -> Iterator[Tokens]:
        whole = len(tokens) // self._step * self._step
        stop = len(tokens) if ended and self._reuse.partial else whole
        return (tokens[start : min(start + self._step, stop)] for start in range(0, stop, self._step))

    def _node(self, parent: Node, part: Tokens) -> Node:
        """The node of a block; for a partial block, this may be a longer one that starts with its tokens."""
        if len(part) < self._step:
            for child, count in self._tree.nearest(parent, part):
                if count < len(part):
                    break
                if all(child.blocks):
                    return child
        return self._tree.child(parent, part)

    def _fill(self, node: Node, index: int, first: Sequence[int], write: Write) -> bool:
        """Bring the blocks of a node into primary memory; False if there is no memory or no rows."""
        present = [block for block in node.blocks if block is not None]
        self._references.guard(present)
        try:
            for block in present:
                if self._groups[block.group].window is None and not self._tiers.bring(block):
                    if node.blocks[block.group] is block:
                        self._counters.blocks_refused += 1
                        return False
                    break  # its file was rejected, so the node is empty now
            absent = [group for group, block in enumerate(node.blocks) if block is None]
            ready = [group for group in absent if index >= first[group]]
            if any(index < first[group] and self._groups[group].window is None for group in absent):
                return False
            return bool(ready or not node.is_empty) and self._write(node, ready, index, write)
        finally:
            self._references.unguard(present)

    def _write(self, node: Node, absent: Sequence[int], index: int, write: Write) -> bool:
        ids: list[int] = []
        for group in absent:
            free = self._tiers.room(group, Tier.PRIMARY)
            if free is None:
                for done, unused in zip(absent, ids, strict=False):
                    self._tiers.pools[Tier.PRIMARY][done].release(unused)
                self._counters.blocks_refused += 1
                return False
            ids.append(free)
        for group, free in zip(absent, ids, strict=True):
            write(group, free, index * self._step, len(node.tokens))
            block = node.blocks[group] = Block(node, group)
            self._tiers.place(block, Tier.PRIMARY, free)
            self._counters.blocks_inserted += 1
        self._tree.attach(node)
        if ids:
            self._replace(node)
        return True

    def _replace(self, node: Node) -> None:
        """Drop a partial block when a longer one replaces it."""
        before = self._tree.left(node)
        if before is None or before.tokens != node.tokens[: len(before.tokens)]:
            return
        if self._is_free(before) and not any(block is not None and block.guards for block in before.blocks):
            self._tiers.drop(before)

    def _pass_windows(self, guarded: Sequence[deque[tuple[int, Block]]], end: int) -> None:
        """Allow eviction of blocks that are outside a limited window."""
        for group, blocks in zip(self._groups, guarded, strict=True):
            needed = group.first_needed(end) // self._step
            while blocks and blocks[0][0] < needed:
                self._references.unguard([blocks.popleft()[1]])

    def _partial(self, node: Node, tokens: Tokens) -> tuple[Node, int] | None:
        """The partially reusable child with the longest common prefix, and the length of that prefix."""
        if not self._reuse.partial or not tokens:
            return None
        for child, count in self._tree.nearest(node, tokens):
            if all(child.blocks) and (self._reuse.copy or self._is_free(child)):
                return child, count
        return None

    def _is_free(self, node: Node) -> bool:
        held = (block is not None and self._references.is_held(block) for block in node.blocks)
        return not node.children and not any(held)

    def _take_over(self, node: Node) -> None:
        blocks = [block for block in node.blocks if block is not None]
        self._tiers.make_private(node)
        for block in blocks:
            self._references.release(block)


def longest_usable(presence: Sequence[Sequence[bool]], windows: Sequence[int], step: int, upper: int) -> int:
    """The largest length up to `upper` at which all blocks of every limited window are present.

    Args:
        presence: for each limited group, whether each block of the path is present.
        windows: their attention windows in tokens, including the attending token.
        step: tokens per block.
        upper: tokens of the path; greater than the start of the last block.

    Returns:
        `upper`, or a multiple of `step`.
    """
    end = upper
    while True:
        shorter = min((_longest(p, w, step, end) for p, w in zip(presence, windows, strict=True)), default=end)
        if shorter == end:
            return end
        end = shorter


def _longest(present: Sequence[bool], window: int, step: int, end: int) -> int:
    stop = -(-end // step)
    while stop:
        if not present[stop - 1]:
            stop -= 1
            continue
        reached = min(end, stop * step)
        needed = max(0, reached - window + 1) // step
        missing = next((i for i in range(stop - 1, needed - 1, -1) if not present[i]), None)
        if missing is None:
            return reached
        stop = missing
    return 0
