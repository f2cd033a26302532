"""A model's own head for further tokens as a drafter: it reads the model's last hidden state of every token.

The head has a cache of its own, which follows the model's: row t is of the hidden state of token t and of token t+1.
Rows of drafts have read guesses of hidden states, so they are dropped before the next draft, and the rows of what the
model has run since then are filled in. Where the model ran no token because its keys and values were restored, hidden
states are unknown: the head's cache begins with the first one that is known, at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine.cache_drafter import REPEAT_FIX, check_states
from edgekv.engine.draft_model import DraftModel
from edgekv.engine.session import Graphs, Session, common_tokens
from edgekv.engine.speculation import ModelDrafter
from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.runtime import Engine, StaticGraph
from edgekv.spec import TARGET_HIDDEN, TARGET_OUT_RESULT
from quant import Encoding

if TYPE_CHECKING:
    from typing import Self


@dataclass(slots=True)
class HeadRows:
    """The head's cache for one text of the target.

    Attributes:
        cache: a row for each token but the first that its rows have read, and then those of drafts.
        start: position of the first row.
        text: the tokens that the rows have read, with those before them.
    """

    cache: KVCache
    start: int = 0
    text: list[int] = field(default_factory=list)

    def follow(self, text: Sequence[int], first: int, most: int) -> int:
        """Keep the rows that a text begins with; return the position of the next one.

        Args:
            text: known tokens.
            first: the first position whose hidden state is known.
            most: the last position to return.
        """
        stop = min(common_tokens(self.text, text) - 1, most)
        if self.cache.dirty or stop <= self.start or stop < first:
            self.cache.reset()
            self.start = stop = first
        else:
            self.cache.rewind_to(stop - self.start)
        self.text = [*text[: stop + 1]]
        return stop


@dataclass(slots=True, eq=False, weakref_slot=True)
class HeadDraftModel:
    """The bundle of a head on an engine, with a cache for each text of its target. Not thread-safe.

    Attributes:
        bundle: the bundle.
    """

    bundle: Bundle
    _engine: Engine
    _make_cache: Callable[[], KVCache]
    _rows: WeakKeyDictionary[Session, HeadRows] = field(default_factory=WeakKeyDictionary)
    _loaded: Graphs | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free its graphs and caches. Closing twice is harmless."""
        self._loaded = None
        self._rows.clear()

    def forget(self) -> None:
        """Free the caches of the target's texts, and the graphs that are bound to one of them."""
        self.close()

    @property
    def draft_model(self) -> HeadDraftModel:
        """Itself; see `Speculation.draft`."""
        return self

    def check(self, target: DraftModel) -> None:
        """Refuse to draft for another model than the one whose head it is.

        Raises:
            UsageError: it was made for other weights, another vocabulary, or hidden states of another form; or the
                target's graphs give none, its contexts are others, or its cache drops tokens.
        """
        check_states(self.bundle, target)
        ours, theirs = self.bundle.manifest, target.bundle.manifest
        if ours.contexts != theirs.contexts:
            got, expected = (f"contexts {', '.join(map(str, each.contexts))}" for each in (ours, theirs))
            at = f"drafter {self.bundle.path}"
            raise UsageError(at, got=got, expected=f"{expected}, those of the target", fix=REPEAT_FIX)

    def drafter(self, vocab: int) -> HeadDrafter:
        """What drafts for one text; `vocab` as for `BundleDrafter`."""
        return HeadDrafter(self, vocab)

    def rows(self, session: Session) -> HeadRows:
        """The cache of the text in a session of the target."""
        found = self._rows.get(session)
        if found is None:
            found = HeadRows(self._make_cache())
            self._rows[session] = found
        return found

    def run(self, rows: HeadRows, tokens: Sequence[int], hidden: NDArray[Any], encoding: Encoding) -> StaticGraph:
        """Append rows; return the graph that has run the last one.

        Args:
            rows: the cache.
            tokens: of the rows, at least one.
            hidden: the hidden states of the tokens before them, `[T, H]`.
            encoding: of these.

        Raises:
            EngineError: the runtime failed.
        """
        cache, done = rows.cache, 0
        if self._loaded is None:
            self._loaded = Graphs(self.bundle, self._engine, cache)
        self._loaded.use(cache)
        cache.expect(len(tokens))
        wanted = self.bundle.manifest.encodings[TARGET_HIDDEN]
        while done < len(tokens):
            most = min(len(tokens) - done, cache.step_tokens)
            graph = self._loaded.choose("prefill", most)
            step = slice(done, done + min(graph.ar, most))
            part, done = tokens[step], step.stop
            graph.target_hidden[: len(part)] = wanted.quantize(encoding.dequantize(hidden[step]))
            windows = cache.window(len(part) if graph.takes_fewer else graph.ar, graph.context, graph.row_block)
            graph.run(part, windows, rows.start + cache.position)
            cache.commit(len(part))
        return graph


class HeadDrafter(ModelDrafter):
    """Proposes the tokens that a model's own head finds most likely behind what the model has run."""

    def __init__(self, model: HeadDraftModel, vocab: int) -> None:
        """Args: model: open while this is used. vocab: as for `ModelDrafter`."""
        super().__init__(vocab)
        self._model = model

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most `k` tokens; none where the target's last pass gave no hidden state, such as after a shared one.

        Raises:
            EngineError: the runtime failed.
        """
        session = self.session
        if session is None or session.last_hidden is None:
            return ()
        started, model, states, known = perf_counter_ns(), self._model, session.hidden, len(session.tokens)
        rows, found = model.rows(session), list[int]()
        # The last row is run again if it is known: its logits are wanted.
        stop = rows.follow(tokens[: known + 1], states.first, known - 1)
        room = rows.cache.room_tokens
        if room is None or room < len(tokens) - stop + k:
            return ()
        unread = [*tokens[stop + 1 :]]
        given, guessed = session.hidden_encoding, model.bundle.manifest.encodings[TARGET_OUT_RESULT]
        graph = model.run(rows, unread[: known - stop], states.rows(stop, known), given)
        rows.text = [*tokens[: known + 1]]
        unread = unread[known - stop :]
        while True:
            if not unread:
                token = int(graph.logits[-1].argmax())
                if token >= self._vocab:
                    break
                found.append(token)
                unread.append(token)
            if len(found) == k:
                break
            hidden = graph.hidden
            assert hidden is not None, "a drafter gives it"
            graph = model.run(rows, [unread.pop(0)], np.array(hidden[-1:]), guessed)
        return self._timed(started, found)
