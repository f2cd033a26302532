"""Adds the block files of earlier and other processes to a store's tree."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.prefix.block import Block, Node, Tier
from edgekv.prefix.disk import FoundFile
from edgekv.prefix.groups import BlockGroup
from edgekv.prefix.storage import BlockStorage
from edgekv.prefix.tiers import Tiers
from edgekv.prefix.tree import Tree


class Adoption:
    """Keeps a store's tree in step with the files that the folder's index lists."""

    def __init__(
        self, tree: Tree, tiers: Tiers, storage: BlockStorage, groups: Sequence[BlockGroup], tokens_per_block: int
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._storage = storage
        self._groups = groups
        self._step = tokens_per_block

    def enter(self, files: Sequence[FoundFile]) -> list[FoundFile]:
        """Add files, shorter sequences first; return those whose prefix files are missing."""
        useless = []
        entered: list[tuple[FoundFile, Block]] = []
        for file in sorted(files, key=lambda file: len(file.record.tokens)):
            block = self._enter(file)
            if block is None:
                useless.append(file)
            else:
                entered.append((file, block))
        self._tiers.recency.adopt(block for _, block in sorted(entered, key=lambda pair: pair[0].used_ns))
        return useless

    def follow(self) -> None:
        """Apply the additions and removals that other processes made in the folder."""
        changes = self._storage.changed_files()
        if changes is not None:
            files, gone = changes
            self._tiers.lose_files(gone)
            self.enter(files)

    def _enter(self, file: FoundFile) -> Block | None:
        record, step = file.record, self._step
        if record.group >= len(self._groups) or not record.tokens:
            return None
        root = self._tree.root(record.root)
        node: Node = root
        for start in range(0, len(record.tokens), step):
            node = self._tree.child(node, record.tokens[start : start + step])
        parent = node.parent
        assert parent is not None
        before = parent.blocks[record.group]
        needs_before = self._groups[record.group].window is None and parent is not root
        if needs_before and (before is None or not before.is_in(Tier.DISK)):
            return None
        block = node.blocks[record.group]
        if block is None:
            block = node.blocks[record.group] = Block(node, record.group, record.priority, used_ns=file.used_ns)
            self._tree.attach(node)
        self._storage.enter_file(block, file.name)
        self._tiers.place(block, Tier.DISK, file.file_bytes)
        return block
