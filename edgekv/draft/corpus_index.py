"""Where in a corpus the end of a text occurs."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

MOST_MATCHED = 32
"""Tokens of context that are compared."""
BYTES_PER_TOKEN = 8
"""Of an index."""
_TOKEN = np.dtype(">u4")  # bytes in the order of their tokens
_PLACE = np.dtype("<u4")
_LARGEST_TOKEN = (1 << 32) - 1


class CorpusIndex:
    """A corpus read backwards, and its positions sorted by the tokens before them.

    Places with a common context are neighbours, so one binary search finds the longest context that occurs.
    """

    def __init__(self, content: bytes | mmap, tokens: int) -> None:
        """Search in what `build_index` made of a number of tokens; further bytes are ignored."""
        self._content = content
        self._size = tokens
        self._order_at = tokens * _TOKEN.itemsize

    def __len__(self) -> int:
        return self._size

    def places(self, context: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Where the end of a context occurs.

        Args:
            context: tokens; the last `MOST_MATCHED` are compared.
            most: how many places to return at most.

        Returns:
            The length of the longest end of the context that occurs, in tokens, and places with it, for `after`.
        """
        newest_first = context[: -MOST_MATCHED - 1 : -1]
        # Ids of rows of pictures are larger than any token's, so no corpus has them.
        end = next((at for at, token in enumerate(newest_first) if token > _LARGEST_TOKEN), len(newest_first))
        key = np.array(newest_first[:end], _TOKEN).tobytes()
        low, high = 0, self._size
        while low < high:
            middle = (low + high) // 2
            if self._context(middle, len(key)) < key:
                low = middle + 1
            else:
                high = middle
        around = [
            (_common_tokens(self._context(at, len(key)), key), at) for at in (low - 1, low) if 0 <= at < self._size
        ]
        length = max((common for common, _ in around), default=0)
        if not length:
            return 0, []
        found: list[int] = []
        start = key[: length * _TOKEN.itemsize]
        for at, step in ((low, 1), (low - 1, -1)):
            while 0 <= at < self._size and len(found) < most and self._context(at, len(start)) == start:
                found.append(self._place(at))
                at += step
        return length, found

    def after(self, place: int, k: int) -> tuple[int, ...]:
        """The next `k` tokens from a place on; fewer at the end of the corpus."""
        piece = self._content[max(place - k, 0) * _TOKEN.itemsize : place * _TOKEN.itemsize]
        return tuple(np.frombuffer(piece, _TOKEN)[::-1].tolist())

    def token_bytes(self, place: int) -> bytes:
        """The next token, as bytes to compare; empty at the end of the corpus."""
        return self._content[(place - 1) * _TOKEN.itemsize : place * _TOKEN.itemsize] if place else b""

    def _place(self, at: int) -> int:
        start = self._order_at + at * _PLACE.itemsize
        return int.from_bytes(self._content[start : start + _PLACE.itemsize], "little")

    def _context(self, at: int, size_bytes: int) -> bytes:
        start = self._place(at) * _TOKEN.itemsize
        return self._content[start : min(start + size_bytes, self._order_at)]


def build_index(tokens: NDArray[np.uint32]) -> bytes:
    """A corpus backwards, then its places ordered by their contexts; see `CorpusIndex`.

    Contexts of `MOST_MATCHED` tokens are sorted by doubling their length (Manber and Myers, 1990).
    """
    backwards = tokens[::-1]
    _, ranks = np.unique(backwards, return_inverse=True)
    ranks = ranks.astype(np.int64)
    length = 1
    while True:
        following = np.full(len(ranks), 0, np.int64)
        following[:-length] = ranks[length:] + 1
        keys = ranks * (len(ranks) + 2) + following
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        steps = np.empty(len(ranks), np.int64)
        steps[0], steps[1:] = 0, sorted_keys[1:] != sorted_keys[:-1]
        np.cumsum(steps, out=steps)
        ranks[order] = steps
        length *= 2
        if length >= MOST_MATCHED or length >= len(ranks) or steps[-1] == len(ranks) - 1:
            return backwards.astype(_TOKEN).tobytes() + order.astype(_PLACE).tobytes()


def _common_tokens(first: bytes, second: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    size = _TOKEN.itemsize
    most = min(len(first), len(second)) // size
    return next((at for at in range(most) if first[at * size :][:size] != second[at * size :][:size]), most)
