"""The rows of tokens held, by their places in the text."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv.arena import Arena, Rows
from edgekv.kv.group import Group
from edgekv.spec.geometry import KvTensor


class HeldRows:
    """Copies rows of some tensors of a group in and out, as long as no step, rewind or reset moves them.

    Attributes:
        first: the oldest token held.
    """

    def __init__(self, group: Group, tensors: Sequence[KvTensor], tokens_seen: int) -> None:
        """Look at a group that holds the newest of `tokens_seen` tokens."""
        self.first = tokens_seen - group.length
        self._rows = group.strategy.held_rows()
        self._runs = _runs(group.arenas, tensors)

    def read(self, token: int, out: Rows) -> None:
        """Copy the rows of consecutive tokens, beginning with `token`, to `out`, `[tensors, tokens, D]`."""
        rows = self._rows[token - self.first :][: out.shape[1]]
        for arena, at, part in self._runs:
            arena.copy_out(at, rows, out[part])

    def write(self, token: int, values: Rows) -> None:
        """Set the rows of consecutive tokens, beginning with `token`; those that are not held are passed over."""
        start = max(self.first - token, 0)
        rows = self._rows[max(token - self.first, 0) :][: max(values.shape[1] - start, 0)]
        for arena, at, part in self._runs:
            arena.copy_in(at, rows, values[part, start : start + len(rows)])


def _runs(arenas: Sequence[Arena], tensors: Sequence[KvTensor]) -> list[tuple[Arena, slice, slice]]:
    """Which consecutive tensors of a arena are which consecutive ones of a list."""
    places = {tensor: (number, at) for number, arena in enumerate(arenas) for at, tensor in enumerate(arena.tensors)}
    runs: list[tuple[int, slice, slice]] = []
    for part, tensor in enumerate(tensors):
        number, at = places[tensor]
        if runs and runs[-1][0] == number and runs[-1][1].stop == at:
            _, ats, parts = runs.pop()
            runs.append((number, slice(ats.start, at + 1), slice(parts.start, part + 1)))
        else:
            runs.append((number, slice(at, at + 1), slice(part, part + 1)))
    return [(arenas[number], ats, parts) for number, ats, parts in runs]
