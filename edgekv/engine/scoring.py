"""The logits after each token of a text, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.graphs import Graphs
from edgekv.engine.session import Session
from edgekv.engine.turns import Hold, Turns
from quant import Encoding


def _do_nothing() -> None:
    """Scored tokens are not stored."""


class Scoring(Iterator[NDArray[np.float32]]):
    """Logits `[rows, V]` of the next tokens, teacher forced; other calls of the model can have a step in between.

    It owns the session until it ends, is closed or is dropped.
    """

    def __init__(
        self,
        turns: Turns,
        session: Session,
        graphs: Graphs,
        encoding: Encoding,
        tokens: Sequence[int],
        adapter: BoundAdapter | None = None,
    ) -> None:
        """Empty the session and load the graphs.

        Args:
            turns: the model's lock.
            session: the model's own.
            graphs: its graphs.
            encoding: of the logits.
            tokens: they begin with the sink, if the bundle has one.
            adapter: what to compute with; None for the base model.

        Raises:
            EngineError: the engine refused a graph.
        """
        self._turns = turns
        self._session = session
        self._encoding = encoding
        self._step_tokens = graphs.most("score")
        self._hold = Hold(turns, None, _do_nothing)
        with turns:
            graphs.prepare("score", "decode")
            self._hold.claim()
            session.reset()
            session.adapt(adapter)
        self._finalizer = finalize(self, self._hold.drop)
        self._left = list(tokens[len(session.tokens) :])
        self._sink = session.cache.sink

    def __next__(self) -> NDArray[np.float32]:
        """The logits of the next step; first those of the sink, if there is one.

        Raises:
            StopIteration: all tokens have been scored, or it was closed.
            ValueError: a later call in the same thread has claimed the session.
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        with self._turns:
            self._hold.check("scoring")
            if self._sink is not None:
                rows, self._sink = self._sink.logits, None
                return self._encoding.dequantize(rows)
            if not self._left:
                self._hold.end()
                raise StopIteration
            piece, self._left = self._left[: self._step_tokens], self._left[self._step_tokens :]
            taken: list[NDArray[Any]] = []
            try:
                self._session.feed(piece, "score", lambda logits: taken.append(self._encoding.dequantize(logits)))
            except BaseException:
                self._left = []
                self._hold.end()
                raise
            return np.concatenate(taken)

    def close(self) -> None:
        """End here and free the session. Closing twice is harmless."""
        with self._turns:
            self._left, self._sink = [], None
            self._hold.end()
