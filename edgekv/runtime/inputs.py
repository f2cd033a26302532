"""The inputs that the host writes before a step, in memory that is bound once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.kv import Window
from edgekv.runtime.binding import aligned_zeros
from edgekv.runtime.mask import AttentionMask
from edgekv.runtime.rope import RopeTable
from edgekv.spec import LOGITS_INDEX, MASK, STEP_KINDS, GraphRecord, rope_inputs


class StepInputs:
    """Token ids or embeddings, masks, cosines and sines, and `logits_index` of an AR step.

    Attributes:
        arrays: by name.
        filled: tokens of the last step.
    """

    def __init__(
        self,
        manifest: Manifest,
        record: GraphRecord,
        ropes: Mapping[str, RopeTable],
        embeddings: NDArray[Any] | None = None,
    ) -> None:
        """Allocate.

        Args:
            manifest: of the bundle.
            record: the graph.
            ropes: see `rope_tables`.
            embeddings: the table `[V, hidden]`, if the graph reads `inputs_embeds` instead of ids.
        """
        decoder = manifest.interface
        inputs = [port for part in decoder.parts(record) for port in part.inputs if port.kind in STEP_KINDS]
        self.arrays: dict[str, NDArray[Any]] = {port.name: aligned_zeros(port.shape, port.dtype) for port in inputs}
        self.filled = 0
        self._table = embeddings
        self._pad = np.asarray(manifest.tokens.pad or 0) if embeddings is None else embeddings[manifest.tokens.pad or 0]
        entry = self.arrays[inputs[0].name]
        self._entry = entry[0] if embeddings is None else entry[0, 0]
        self._rotary = [
            (table, *(self.arrays[name][0, 0] for name in names))
            for suffix, table in ropes.items()
            if (names := rope_inputs(suffix))[0] in self.arrays
        ]
        self._index = self.arrays.get(LOGITS_INDEX)
        first_group: dict[str, int] = {}  # groups with the same window share a mask
        for group, geometry in enumerate(decoder.cache.groups()):
            first_group.setdefault(decoder.mask_of(geometry), group)
        self._masks = [
            (group, AttentionMask(self.arrays[name][0, 0], manifest.encodings[MASK]))
            for name, group in first_group.items()
        ]

    def write(self, tokens: Sequence[int], position: int, windows: Sequence[Window], columns: Sequence[int]) -> None:
        """Write a step; see `StaticGraph.run`."""
        n = len(tokens)
        self._entry[:n] = tokens if self._table is None else self._table[list(tokens)]
        for table, cos, sin in self._rotary:
            cos[:n], sin[:n] = table.rows(position, n)
        for group, mask in self._masks:
            mask.write(n, windows[group], columns)
        if n == self.filled:
            return
        # Rows without a token: their results are not used.
        self._entry[n:] = self._pad
        for table, cos, sin in self._rotary:
            cos[n:], sin[n:] = table.rows(0, 1)
        if self._index is not None:
            self._index[0] = n - 1
        self.filled = n
