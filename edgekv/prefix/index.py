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
    """The tree and the tiers put together."""

    def __init__(
        self, tree: Tree, tiers: Tiers, groups: Sequence[BlockGroup], step: int, reuse: Reuse, counters: Counters
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._groups = groups
        self._step = step
        self._reuse = reuse
        self._counters = counters
        # A node has at least one block, so that a single group of full attention has no gaps.
        alone = len(groups) == 1 and groups[0].window is None
        self._checked: Sequence[int] = () if alone else range(len(groups))

    def match(self, key: bytes, tokens: Tokens) -> Lease:
        """Hold the longest prefix of a sequence that every group has."""
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
        """Store the blocks of a sequence that are not stored yet, as far as there is room.

        Args:
            root: of the sequence's salt.
            tokens: the sequence.
            first: of each group, the first block whose rows the caller has.
            wanted: what is asked for the block of an index.
            write: takes a group, an id in primary memory, the first token and the number of tokens of a block, and
                writes its rows there.
            ended: store the last block too if it is not full and may be reused in part.

        Returns:
            The nodes from the beginning on that are stored.
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
                    self._tiers.guard([block])
                    guarded[group].append((index, block))
                    self._tiers.recency.touch(block)
                    if retention is not None:
                        self._tiers.recency.retain(block, retention)
            return nodes
        finally:
            for blocks in guarded:
                self._tiers.unguard(block for _, block in blocks)

    def extend(self, lease: Lease, nodes: list[Node], upper: int) -> None:
        """Hold `upper` tokens of these nodes instead of what a lease holds, less what has left a limited window."""
        held = self._hold(nodes, upper)
        self.release(lease)
        lease.tokens, lease.spans = held.tokens, held.spans

    def release(self, lease: Lease) -> None:
        """Give back what a lease holds."""
        for span in lease.spans:
            for block in span.blocks:
                self._tiers.release(block)
        lease.spans = ()

    def usable(self, nodes: list[Node], upper: int) -> int:
        """How many of the first `upper` tokens of a path every group can serve."""
        presence = [[node.blocks[i] is not None for node in nodes] for i in self._checked]
        windows = [self._groups[i].window or upper + 1 for i in self._checked]
        return longest_usable(presence, windows, self._step, upper)

    def _hold(self, nodes: list[Node], upper: int) -> Lease:
        """Bring the needed blocks into primary memory and retain them; a missing one shortens the match."""
        guarded = [block for node in nodes for block in node.blocks if block is not None]
        self._tiers.guard(guarded)
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
                self._tiers.retain(block)
            return Lease(end, spans)
        finally:
            self._tiers.unguard(guarded)

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
        """The node of a block; a partial block may use a longer one that starts with its tokens."""
        if len(part) < self._step:
            for child, count in self._tree.nearest(parent, part):
                if count < len(part):
                    break
                if all(child.blocks):
                    return child
        return self._tree.child(parent, part)

    def _fill(self, node: Node, index: int, first: Sequence[int], write: Write) -> bool:
        """Get the blocks of a node into primary memory; False if there is no room, or no rows."""
        present = [block for block in node.blocks if block is not None]
        self._tiers.guard(present)
        try:
            for block in present:
                if self._groups[block.group].window is None and not self._tiers.bring(block):
                    if node.blocks[block.group] is block:
                        self._counters.blocks_refused += 1
                        return False
                    break  # its file was rejected, and the node is empty now
            absent = [group for group, block in enumerate(node.blocks) if block is None]
            ready = [group for group in absent if index >= first[group]]
            if any(index < first[group] and self._groups[group].window is None for group in absent):
                return False
            return bool(ready or not node.is_empty) and self._write(node, ready, index, write)
        finally:
            self._tiers.unguard(present)

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
        """Allow eviction of blocks that a limited window no longer reaches."""
        for group, blocks in zip(self._groups, guarded, strict=True):
            needed = group.first_needed(end) // self._step
            while blocks and blocks[0][0] < needed:
                self._tiers.unguard([blocks.popleft()[1]])

    def _partial(self, node: Node, tokens: Tokens) -> tuple[Node, int] | None:
        """The child with the longest common prefix that may be reused in part, and that prefix's length."""
        if not self._reuse.partial or not tokens:
            return None
        for child, count in self._tree.nearest(node, tokens):
            if all(child.blocks) and (self._reuse.copy or self._is_free(child)):
                return child, count
        return None

    def _is_free(self, node: Node) -> bool:
        return not node.children and not any(block is not None and self._tiers.is_held(block) for block in node.blocks)

    def _take_over(self, node: Node) -> None:
        blocks = [block for block in node.blocks if block is not None]
        self._tiers.make_private(node)
        for block in blocks:
            self._tiers.release(block)


def longest_usable(presence: Sequence[Sequence[bool]], windows: Sequence[int], step: int, upper: int) -> int:
    """The largest length up to `upper` at which every limited window lies in blocks that are present.

    Args:
        presence: of each limited group, whether each block of the path is there.
        windows: their attention windows in tokens, the attending token included.
        step: tokens of a block.
        upper: tokens of the path; above the last block's beginning.

    Returns:
        `upper`, or tokens up to the end of a block.
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
