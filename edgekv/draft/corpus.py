"""Drafts copied from a text file of the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekv.draft.corpus_index import MOST_MATCHED, CorpusIndex, build_index
from edgekv.draft.index_files import kept_index
from edgekv.draft.tree import DraftTree
from edgekv.errors import UsageError
from edgekv.machine.system import MIB, read_file
from edgekv.spec.text import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGEST_BYTES = 64 * MIB
_PIECE_CHARACTERS = 1 << 16
_CANDIDATES = 16
_BRANCHES = 4
_FIX = "Give a UTF-8 text file, such as source code."


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
        self.support, places = self._index.places(tokens[-MOST_MATCHED:], _CANDIDATES)
        if not places:
            return ()
        next_tokens = [self._index.token_bytes(place) for place in places]
        frequent = Counter(next_tokens).most_common(self._branches)
        found = [self._index.after(places[next_tokens.index(token)], k) for token, _ in frequent]
        return found[0] if len(found) == 1 else DraftTree.of(found, k)

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
        found = error.strerror if isinstance(error, OSError) else error
        wanted = f"UTF-8 text of at most {LARGEST_BYTES >> 20} MiB"
        raise UsageError(field, got=f"{path}: {found}", expected=wanted, fix=_FIX) from None
    if "\0" in text:
        raise UsageError(field, got=f"{path}: a binary file", expected="UTF-8 text", fix=_FIX)
    if not text.strip():
        raise UsageError(field, got=f"{path}: no text", expected="some", fix=_FIX)

    def make() -> bytes:
        return build_index(np.array(_tokens(text, tokenizer, vocab, field), np.uint32))

    return kept_index((raw, tokenizer.to_str().encode(), str(vocab).encode()), make)


def _tokens(text: str, tokenizer: Tokenizer, vocab: int, field: str) -> list[int]:
    """The tokens of a text, which is divided at lines: a tokenizer needs many times the memory of its text."""
    found: list[int] = []
    at = 0
    while at < len(text):
        end = text.find("\n", at + _PIECE_CHARACTERS) + 1 or len(text)
        found += encode(tokenizer, text[at:end], vocab=vocab, field=field, add_special_tokens=False)
        at = end
    return found
