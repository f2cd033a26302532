"""One sequence on its cache: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Role
from edgekv.errors import EdgeKVError
from edgekv.kv import KVCache
from edgekv.session.graphs import Graphs


class Session:
    """A cache, its tokens, and the graphs that extend it. Not thread-safe.

    Attributes:
        cache: the memory.
        tokens: the tokens run so far, oldest first; `len(tokens)` is the position of the next one. With a sliding
            window they include evicted ones.
        writer: the call that extended it last; it can continue without comparing tokens.
    """

    def __init__(self, cache: KVCache, graphs: Graphs) -> None:
        """Start with an empty cache."""
        self.cache = cache
        self.tokens: list[int] = []
        self.writer: object = None
        self._graphs = graphs

    def feed(
        self, tokens: Sequence[int], role: Role = "prefill", take: Callable[[NDArray[Any]], None] | None = None
    ) -> NDArray[Any]:
        """Run the next tokens.

        Args:
            tokens: at least one.
            role: of the graphs that run several tokens; the decode graph runs single ones.
            take: called with the logits of each step, `[rows, V]`.

        Returns:
            The logits of the last token as integers `[V]`, valid until the next step.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        if not tokens:
            raise ValueError("tokens: got none; expected at least one")
        self._graphs.use(self.cache)
        self.cache.expect(len(tokens))
        done = 0
        while done < len(tokens):
            graph = self._graphs.choose(role, len(tokens) - done)
            step = tokens[done : done + graph.ar]
            done += len(step)
            try:
                graph.step(step, logits=take is not None or done == len(tokens))
            except EdgeKVError:
                raise  # the cache is unchanged by the failed step
            except BaseException:  # such as Ctrl-C
                self._drop_half_a_step()
                raise
            self.tokens += step
            if take is not None:
                take(graph.logits)
        last: NDArray[Any] = graph.logits[-1]
        return last

    def score(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run the next tokens and return the logits of each as integers `[T, V]`.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        rows: list[NDArray[Any]] = []
        self.feed(tokens, "score", lambda logits: rows.append(logits.copy()))
        return np.concatenate(rows)

    def reset(self) -> None:
        """Hold nothing."""
        self.cache.reset()
        self.tokens.clear()
        self.writer = None

    def reuse(self, tokens: list[int]) -> int:
        """Keep the longest common prefix with a sequence of tokens and return its length.

        At least the last token is left to be run, since its logits are needed. A cache that has evicted tokens can be
        extended but not rewound: it is reset unless the sequence continues it.
        """
        if self.cache.tokens_seen != len(self.tokens):
            self.reset()  # the cache was used without this session
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
        """Record that the cache now contains these tokens."""
        self.tokens = list(tokens)
        self.writer = None

    def yield_to(self, other: Session) -> None:
        """Switch the graphs to another session's cache, so that this one's memory can be freed."""
        if self._graphs.cache is self.cache:
            self._graphs.use(other.cache)

    def _drop_half_a_step(self) -> None:
        """Reset the session if only a part of the cache has committed a step."""
        cache, seen = self.cache, self.cache.tokens_seen
        parts = [(cache.length, cache.capacity), *((group.length, group.capacity) for group in cache.groups)]
        if any(length != min(seen, capacity) for length, capacity in parts):
            self.reset()
