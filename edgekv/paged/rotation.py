"""Re-rotation of cached keys to other positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from edgekv.paged.arrays import Floats, Ints, check_array, check_range, check_shape, shape_text
from edgekv.paged.caches import Caches
from edgekv.paged.errors import PagedInputError


def rotation_trig_lut(inverse_frequencies: Sequence[float], rows: int, dtype: DTypeLike = np.float32) -> Floats:
    """A table `[rows, S]` for keys with S/2 rotary frequencies; row d moves a key d positions back.

    Row d is cos(d f) for each frequency f, then sin(-d f): rotary embedding (RoFormer, arXiv 2104.09864) rotates a pair
    at position p by p f, so rotating it by -d f moves it to position p-d. The entries are computed in float64.

    Raises:
        PagedInputError: no frequency, one that is not finite, or fewer than one row.
    """
    frequencies = np.asarray(inverse_frequencies, np.float64)
    if frequencies.ndim != 1 or not frequencies.size or not np.isfinite(frequencies).all():
        expected = "one finite number for each pair of a head's elements"
        raise PagedInputError("inverse_frequencies", got=inverse_frequencies, expected=expected)
    if rows < 1:
        raise PagedInputError("rows", got=rows, expected="at least 1")
    angles = np.arange(rows)[:, None] * frequencies
    table: Floats = np.concatenate([np.cos(angles), np.sin(-angles)], axis=1).astype(dtype)
    return table


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Whole blocks whose keys are rotated in all KV heads; a block listed twice is rotated twice.

    Attributes:
        blocks: `[n]`, blocks of the key cache.
        deltas: `[n, 1]` or `[n, bs]`, the table's row for a block or for each of its slots.
        table: `[M, S]`; the first half of a row holds cosines, the second sines.
    """

    blocks: Ints
    deltas: Ints
    table: Floats

    @classmethod
    def of(cls, caches: Caches, blocks: object, deltas: object, table: object) -> Rotation | None:
        """The rotation given by the operator's three optional inputs; None without them.

        Raises:
            PagedInputError: only some of them are given, one is of another type or shape, S is odd, or a block or a
                row of the table is out of range.
        """
        arguments = {"rotated_block_indices": blocks, "rotation_deltas": deltas, "rotation_trig_lut": table}
        missing = [field for field, value in arguments.items() if value is None]
        if len(missing) == len(arguments):
            return None
        if missing:
            present = " and ".join(field for field in arguments if field not in missing)
            raise PagedInputError(missing[0], got="None", expected=f"an array, because {present} was given")
        listed: Ints = check_array("rotated_block_indices", blocks, np.int32, 1).astype(np.int64)
        check_range("rotated_block_indices", listed, 0, caches.blocks, f"a block of the {caches.blocks} in the caches")
        lut = check_array("rotation_trig_lut", table, caches.dtype, 2)
        check_shape("rotation_trig_lut", lut, (len(lut), caches.key_size), "rows as long as a key")
        if caches.key_size % 2:
            raise PagedInputError("key_cache", got=f"keys of {caches.key_size}", expected="an even size, to be rotated")
        rows: Ints = check_array("rotation_deltas", deltas, np.int32, 2).astype(np.int64)
        if len(rows) != len(listed) or rows.shape[1] not in (1, caches.block_tokens):
            expected = f"[{len(listed)}, 1] or [{len(listed)}, {caches.block_tokens}], one row for each rotated block"
            raise PagedInputError("rotation_deltas", got=shape_text(rows.shape), expected=expected)
        check_range("rotation_deltas", rows, 0, len(lut), f"a row of the {len(lut)} in rotation_trig_lut")
        return cls(listed, rows, lut)

    def apply(self, caches: Caches) -> None:
        """Rotate each pair (x, y) of elements i and i + S/2: x' = x cos - y sin, y' = x sin + y cos."""
        for turn in _turns(self.blocks):
            blocks = self.blocks[turn]
            cos, sin = np.split(self.table[self.deltas[turn]].astype(np.float64)[:, None], 2, axis=-1)
            x, y = np.split(caches.key[blocks].astype(np.float64), 2, axis=-1)
            # Slots without a token are rotated too and may contain anything.
            with np.errstate(invalid="ignore", over="ignore"):
                caches.key[blocks] = np.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1)


def _turns(blocks: Ints) -> Iterator[Ints]:
    """Indices into `blocks` in groups: the first occurrence of every block, then the second ones, and so on."""
    order = np.argsort(blocks, kind="stable")
    _, firsts, counts = np.unique(blocks[order], return_index=True, return_counts=True)
    mention = np.arange(len(blocks)) - np.repeat(firsts, counts)
    for turn in range(int(counts.max(initial=0))):
        yield order[mention == turn]
