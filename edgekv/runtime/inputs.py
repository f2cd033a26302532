"""The small inputs of a graph, in memory that is bound once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.bundle import EMBEDDINGS, IDS, rope_inputs
from edgekv.kv import Window
from edgekv.runtime.binding import aligned_zeros
from edgekv.runtime.mask import AttentionMask
from edgekv.runtime.rope import RopeTable
from edgekv.runtime.signature import Port
from quant import Encoding


class StepInputs:
    """Token ids or their embeddings, masks, rotary embedding and `logits_index` of an AR step.

    Attributes:
        arrays: by name.
        filled: tokens of the step that was written last.
    """

    def __init__(
        self,
        ports: Iterable[Port],
        masks: Sequence[str],
        mask_encoding: Encoding,
        pad: int,
        ropes: Mapping[str, RopeTable],
        embeddings: NDArray[Any] | None = None,
    ) -> None:
        """Allocate.

        Args:
            ports: all inputs of the graph; those of the cache, and between parts, are left out.
            masks: name of the mask for each group of the cache.
            mask_encoding: of all masks.
            pad: the token id of rows without a token.
            ropes: cosines and sines, by the suffix of their inputs.
            embeddings: the table `[V, hidden]`, if the graph reads `inputs_embeds` instead of ids.
        """
        self.arrays: dict[str, NDArray[Any]] = {
            port.name: aligned_zeros(port.shape, port.dtype)
            for port in ports
            if not port.name.startswith(("past_", "hidden_"))
        }
        self.filled = 0
        self._pad = pad
        self._table = embeddings
        self._entry = self.arrays[IDS][0] if embeddings is None else self.arrays[EMBEDDINGS][0, 0]
        self._rotary = [
            (table, *(self.arrays[name][0, 0] for name in rope_inputs(suffix))) for suffix, table in ropes.items()
        ]
        self._index = self.arrays.get("logits_index")
        # Groups of one window see alike: the first speaks for all.
        self._masks = {
            masks.index(name): AttentionMask(self.arrays[name][0, 0], mask_encoding) for name in dict.fromkeys(masks)
        }

    def write(self, tokens: Sequence[int], position: int, windows: Sequence[Window], columns: Sequence[int]) -> None:
        """Write a step; see `StaticGraph.run`."""
        n = len(tokens)
        self._entry[:n] = tokens if self._table is None else self._table[list(tokens)]
        for table, cos, sin in self._rotary:
            cos[:n], sin[:n] = table.rows(position, n)
        for group, mask in self._masks.items():
            mask.write(n, windows[group], columns)
        if n == self.filled:
            return
        # The other rows are read by nobody; a row without an open column is harmless.
        self._entry[n:] = self._pad if self._table is None else self._table[self._pad]
        for table, cos, sin in self._rotary:
            cos[n:], sin[n:] = table.rows(0, 1)
        if self._index is not None:
            self._index[0] = n - 1
        self.filled = n
