"""One sequence: its tokens, and the cache that holds their keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.kv import KVCache


class HeldSequence:
    """A cache that knows which tokens it holds.

    Attributes:
        cache: the memory.
        tokens: the tokens run so far, oldest first; `len(tokens)` is the position of the next one. With a sliding
            window they include those that have left.
        writer: who extended it last, and need not compare tokens to go on.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.writer: object = None

    def reset(self) -> None:
        """Hold nothing."""
        self.cache.reset()
        self.tokens.clear()
        self.writer = None

    def reuse(self, tokens: list[int]) -> int:
        """Drop what does not begin this sequence of tokens, and return how many of them are held.

        At least the last token is left to be run, since its logits are wanted. If tokens have left the window, what
        is held can be extended but not taken back, so that it is dropped whole if it does not fit.
        """
        if self.cache.tokens_seen != len(self.tokens):
            self.reset()  # the cache was used past this object
        common = min(len(self.tokens), len(tokens) - 1)
        if self.tokens[:common] != tokens[:common]:
            pairs = zip(self.tokens, tokens, strict=False)
            common = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
        surplus = len(self.tokens) - common
        if common == 0 or (surplus and not self.cache.is_whole):
            self.reset()
            return 0
        if surplus:
            self.cache.rewind(surplus)
            del self.tokens[common:]
        return common

    def adopt(self, tokens: Sequence[int]) -> None:
        """Note that the cache was given these tokens instead of what it held."""
        self.tokens = list(tokens)
        self.writer = None

    def record(self, tokens: Sequence[int], writer: object) -> None:
        """Note that these tokens were run next, as far as the cache has committed them."""
        self.tokens += tokens
        del self.tokens[self.cache.tokens_seen :]
        self.writer = writer
