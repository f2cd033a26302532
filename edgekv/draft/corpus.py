"""Drafts copied from a text file of the user: its index, kept in the user's cache folder, and what it proposes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.draft.tree import DraftTree
from edgekv.errors import UsageError
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import MIB, cache_folder, open_regular, read_file
from edgekv.spec.text import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_MATCHED = 32
"""Tokens of context that are compared."""
BYTES_PER_TOKEN = 8
"""Of an index."""
_TOKEN = np.dtype(">u4")  # bytes in the order of their tokens
_PLACE = np.dtype("<u4")
_LARGEST_TOKEN = (1 << 32) - 1
LARGEST_BYTES = 64 * MIB
_PIECE_CHARACTERS = 1 << 16
_CANDIDATES = 16
_BRANCHES = 4
_FIX = "Give a UTF-8 text file, such as source code."
CORPORA = "corpora"
_SUFFIX = ".corpus"
_FORMAT = b"edgekv corpus 1\n"
_MAX_FILES = 16
_DIGEST_BYTES = sha256().digest_size


class CorpusDrafter:
    """Proposes what follows the longest end of the text that occurs in a corpus.

    Attributes:
        name: for statistics.
        support: tokens of context that the last proposal rests on.
        ns_per_token: none worth counting.
    """

    name = "corpus"
    ns_per_token = 0.0

    def __init__(self, index: CorpusIndex, *, tree: bool = False) -> None:
        """Look up a corpus, which several texts may share; as a `tree`, propose what followed in several places."""
        self.support = 0
        self._index = index
        self._branches = _BRANCHES if tree else 1

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """The most frequent continuations among the first places that match best; none at the end of the corpus."""
        self.support, places = self._index.places(tokens[-MAX_MATCHED:], _CANDIDATES)
        if not places:
            return ()
        next_tokens = [self._index.token_bytes(place) for place in places]
        frequent = Counter(next_tokens).most_common(self._branches)
        drafts = [self._index.after(places[next_tokens.index(token)], k) for token, _ in frequent]
        return drafts[0] if len(drafts) == 1 else DraftTree.of(drafts, k)

    def accepted(self, n: int) -> None:
        """No-op."""


def open_corpus(path: Path, tokenizer: Tokenizer, vocab: int, field: str = "draft corpus") -> CorpusIndex:
    """The index of a text file, made once for each content and tokenizer and kept in the user's cache folder.

    Args:
        path: a UTF-8 file of at most 64 MiB.
        tokenizer: of the bundle.
        vocab: number of the model's embeddings.
        field: names the file in errors.

    Raises:
        UsageError: the file cannot be read, is too large, empty or no text, or has tokens beyond the vocabulary.
    """
    try:
        raw = read_file(path, LARGEST_BYTES)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        expected = f"UTF-8 text of at most {LARGEST_BYTES >> 20} MiB"
        raise UsageError(field, got=f"{path}: {got}", expected=expected, fix=_FIX) from None
    if "\0" in text:
        raise UsageError(field, got=f"{path}: a binary file", expected="UTF-8 text", fix=_FIX)
    if not text.strip():
        raise UsageError(field, got=f"{path}: no text", expected="some", fix=_FIX)

    def make() -> bytes:
        return build_index(np.array(_tokens(text, tokenizer, vocab, field), np.uint32))

    return kept_index((raw, tokenizer.to_str().encode(), str(vocab).encode()), make)


def _tokens(text: str, tokenizer: Tokenizer, vocab: int, field: str) -> list[int]:
    """The tokens of a text, which is divided at lines: a tokenizer needs many times the memory of its text."""
    tokens: list[int] = []
    at = 0
    while at < len(text):
        end = text.find("\n", at + _PIECE_CHARACTERS) + 1 or len(text)
        tokens += encode(tokenizer, text[at:end], vocab=vocab, field=field, add_special_tokens=False)
        at = end
    return tokens


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
            context: tokens; the last `MAX_MATCHED` are compared.
            most: how many places to return at most.

        Returns:
            The length of the longest end of the context that occurs, in tokens, and places with it, for `after`.
        """
        newest_first = context[: -MAX_MATCHED - 1 : -1]
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
        places: list[int] = []
        start = key[: length * _TOKEN.itemsize]
        for at, step in ((low, 1), (low - 1, -1)):
            while 0 <= at < self._size and len(places) < most and self._context(at, len(start)) == start:
                places.append(self._place(at))
                at += step
        return length, places

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

    Contexts of `MAX_MATCHED` tokens are sorted by doubling their length (Manber and Myers, 1990).
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
        if length >= MAX_MATCHED or length >= len(ranks) or steps[-1] == len(ranks) - 1:
            return backwards.astype(_TOKEN).tobytes() + order.astype(_PLACE).tobytes()


def _common_tokens(first: bytes, second: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    size = _TOKEN.itemsize
    most = min(len(first), len(second)) // size
    return next((at for at in range(most) if first[at * size :][:size] != second[at * size :][:size]), most)


def kept_index(key: Sequence[bytes], make: Callable[[], bytes]) -> CorpusIndex:
    """An index that is made once and mapped from its file.

    A file ends with a hash of its content, and is named after what it is made from. A cache folder that cannot be used
    is ignored. The 16 files used last stay.

    Args:
        key: what the index depends on.
        make: see `build_index`.
    """
    digest = sha256(_FORMAT)
    for part in key:
        digest.update(sha256(part).digest())
    kept = cache_folder() / CORPORA / f"{digest.hexdigest()}{_SUFFIX}"
    with suppress(OSError, ValueError):
        return _map(kept)
    content = make()
    with suppress(OSError, ValueError):
        _keep(kept, content)
        return _map(kept)
    return CorpusIndex(content, len(content) // BYTES_PER_TOKEN)


def _keep(kept: Path, content: bytes) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(kept, flush=False) as partial:
        partial.touch(0o600)
        with partial.open("wb") as file:
            file.write(content)
            file.write(sha256(content).digest())
    newest_first = sorted(kept.parent.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime_ns)
    for old in newest_first[_MAX_FILES:]:
        old.unlink(missing_ok=True)


def _map(kept: Path) -> CorpusIndex:
    """The index in a file.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    with open_regular(kept) as file:
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
    size = len(mapped) - _DIGEST_BYTES
    with memoryview(mapped) as whole:
        if size < BYTES_PER_TOKEN or sha256(whole[:size]).digest() != whole[size:]:
            raise ValueError(f"{kept}: damaged")
    os.utime(kept)
    return CorpusIndex(mapped, size // BYTES_PER_TOKEN)
