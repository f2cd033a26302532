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
    """A cache, the tokens that it holds, and the graphs that extend it. Not for several threads at once.

    Attributes:
        cache: the memory.
        tokens: the tokens run so far, oldest first; `len(tokens)` is the position of the next one. With a sliding
            window they include those that have left.
        writer: the call that extended it last, which need not compare tokens to continue.
    """

    def __init__(self, cache: KVCache, graphs: Graphs) -> None:
        """Begin with what an empty cache holds."""
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
            take: is given the logits of each step, `[rows, V]`.

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
                raise  # the cache is as it was before the step
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
        """Drop what does not begin a sequence of tokens, and return how many of its tokens are held.

        At least the last token is left to be run, since its logits are wanted. If tokens have left the window, what
        is held can be extended but not taken back; then it is dropped whole if it does not fit.
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
        """Note that the cache was given these tokens instead of what it held."""
        self.tokens = list(tokens)
        self.writer = None

    def yield_to(self, other: Session) -> None:
        """Let the graphs work on another session's cache, so that nothing keeps this one's memory alive."""
        if self._graphs.cache is self.cache:
            self._graphs.use(other.cache)

    def _drop_half_a_step(self) -> None:
        """Hold nothing if only a part of the cache took the rows of a step."""
        cache, seen = self.cache, self.cache.tokens_seen
        parts = [(cache.length, cache.capacity), *((group.length, group.capacity) for group in cache.groups)]
        if any(length != min(seen, capacity) for length, capacity in parts):
            self.reset()
