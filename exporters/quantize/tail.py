"""The checkpoint and the tail of a gated delta rule or Mamba-2 in floats, for the reference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import KvTensor, fold
from edgekv.spec import CHECKPOINT_TOKENS, DeltaRule

Floats = NDArray[np.float32]


class Tail:
    """S at a checkpoint, and the rows of the tokens since; see `edgekv.graphs.delta_rule`.

    Arrays may have leading axes, such as one for the exact decoder and the quantized one.

    Attributes:
        tokens: of the step that is open.
    """

    def __init__(self, layer: int) -> None:
        """Without a token."""
        self._layer = layer
        self._rows: dict[KvTensor, Floats] = {}
        self._new: dict[KvTensor, Floats] = {}
        self._state: Floats | None = None
        self.tokens = 0

    def open(self, rule: DeltaRule, like: Floats, tokens: int) -> None:
        """Begin a window of `tokens` tokens; `like` has the leading axes of its arrays."""
        self.tokens = tokens
        if self._state is None:
            leading = like.shape[:-2]
            self._state = np.zeros((*leading, rule.key_dim, rule.values), np.float32)
            widths = {KvTensor(self._layer, "delta_key", 0): rule.keys, self._values: rule.values}
            widths |= dict.fromkeys(self._decays(rule), 1)
            self._rows = {tensor: np.zeros((*leading, 0, width), np.float32) for tensor, width in widths.items()}

    def append(self, tensor: KvTensor, new: Floats) -> Floats:
        """Past and new rows."""
        self._new[tensor] = new
        return np.concatenate([self._rows[tensor], new], axis=-2)

    def stored(self, tensor: KvTensor) -> Floats:
        """Past rows, or S of all heads."""
        if tensor.kind == "recurrent":
            assert self._state is not None, "a window is open"
            return self._state
        return self._rows[tensor]

    def decay_sums(self, rows: Floats) -> Floats:
        """See `Ops`."""
        totals = np.cumsum(rows[..., 0], axis=-1, dtype=np.float64)
        own = totals[..., -self.tokens :]
        before = np.concatenate([totals, np.zeros_like(totals[..., :1])], axis=-1)
        decays: Floats = np.minimum(own[..., :, None] - before[..., None, :], 0).astype(np.float32)
        return decays

    def seen(self, x: Floats) -> Floats:
        """With zeros in the rows after a token."""
        masked: Floats = x * np.tri(self.tokens, x.shape[-1], self.past, dtype=np.float32)
        return masked

    @property
    def past(self) -> int:
        """Tokens of the tail."""
        return self._rows[self._values].shape[-2]

    def commit(self, rule: DeltaRule) -> None:
        """Keep the rows of the window; S takes them up once there are as many as between two checkpoints."""
        self._rows = {tensor: np.concatenate([rows, self._new[tensor]], axis=-2) for tensor, rows in self._rows.items()}
        if self._rows[self._values].shape[-2] >= CHECKPOINT_TOKENS:
            oldest, self._rows = self._rows, {tensor: rows[..., :0, :] for tensor, rows in self._rows.items()}
            decays = np.concatenate([oldest[tensor] for tensor in self._decays(rule)], axis=-1)
            assert self._state is not None, "a window was open"
            keys = oldest[KvTensor(self._layer, "delta_key", 0)]
            leading, by_head = keys.shape[:-2], (rule.value_heads, rule.value_dim)
            state = self._state.reshape(*leading, rule.key_dim, *by_head).swapaxes(-3, -2)
            state = fold(
                state,
                keys.reshape(*leading, CHECKPOINT_TOKENS, rule.key_heads, rule.key_dim),
                oldest[self._values].reshape(*leading, CHECKPOINT_TOKENS, *by_head),
                decays,
                corrects=rule.corrects,
            )
            self._state = state.swapaxes(-3, -2).reshape(*leading, rule.key_dim, -1)

    @property
    def _values(self) -> KvTensor:
        return KvTensor(self._layer, "delta_value", 0)

    def _decays(self, rule: DeltaRule) -> list[KvTensor]:
        return [KvTensor(self._layer, "decay", head) for head in range(rule.value_heads)]
