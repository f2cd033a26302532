"""Several sequences in one pass: a token of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.engine.caches import CacheSetup
from edgekv.engine.session import Graphs, Session
from edgekv.errors import refuse
from edgekv.kv import Arena, BatchColumns, CacheGroup, KVCache
from edgekv.runtime import RowView


class Batch:
    """Advances several sessions in one pass of the largest verify graph: a row for each, which sees its own past alone.

    The past of all of them is in one window, in the same columns of every layer: as many as the layers with the
    smallest window have. A session's rows are copied into it when it joins, and again after a step without the batch;
    each new row is written to both. States are an input of the pass: the rows that the next token reads are copied each
    time. Sessions that find no column run by themselves.

    Attributes:
        most: sessions of a pass at most.
        passes: passes run.
        rows: tokens that they brought.
        bytes_copied: bytes copied into the window, by sessions that joined.
    """

    def __init__(self, graphs: Graphs, cache: KVCache) -> None:
        """Start with no session.

        Args:
            graphs: of the model, with verify graphs.
            cache: memory of the window, with the update strategy `slot` and the policy `fail`; nothing else uses it.

        Raises:
            EngineError: the engine refused the graph.
            ValueError: there is no verify graph.
        """
        self._graphs = graphs
        self._graph = graphs.largest_verify()
        self._cache = cache
        self.most = self._graph.ar
        context = cache.geometry.context
        with cache.hold(context - self.most):
            pass  # no row is read before one is written
        columns = min(each.past_rows(self.most, context) for each in cache.geometry.rows())
        self._columns = BatchColumns(columns)
        self._revisions: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self.passes = self.rows = self.bytes_copied = 0

    def advance(self, sessions: Sequence[Session], tokens: Sequence[int]) -> list[NDArray[Any] | None]:
        """Run the next token of each session, in one pass of those that have room.

        Args:
            sessions: at most `most`, all with one adapter; each holds all tokens before its next one.
            tokens: ids.

        Returns:
            The logits after each token as integers `[V]`; None for a session that did not run.

        Raises:
            EngineError: the runtime failed; no session has changed.
            ValueError: the sessions have different adapters.
        """
        if len({id(session.adapter) for session in sessions}) > 1:
            raise ValueError("sessions: got several adapters; expected one for a pass")
        found: list[NDArray[Any] | None] = [None] * len(sessions)
        placed: list[int] = []
        for at, session in enumerate(sessions):
            if self._place(session, sessions, new=len(placed) + 1):
                placed.append(at)
        if not placed:
            return found
        views = [
            RowView(cache.tokens_seen, self._columns.of(id(sessions[at])), (row,), cache.newest_states)
            for row, at in enumerate(placed)
            for cache in [sessions[at].cache]
        ]
        self._graphs.use(self._cache, sessions[0].adapter)
        windows = self._cache.window(self.most)
        self._graph.run([tokens[at] for at in placed], windows, 0, views)
        landed = self._cache.new_rows(windows)
        for row, place in enumerate(placed):
            session = sessions[place]
            new = [rows[:, row] for rows in landed]
            session.append(tokens[place], new)
            column = self._columns.append(id(session))
            for at, _, arena in _attending(self._cache):
                arena.row(column)[:] = new[at]
            self._revisions[session] = session.cache.revision
            found[place] = self._graph.logits[row].copy()
        self.passes += 1
        self.rows += len(placed)
        return found

    def _place(self, session: Session, needed: Sequence[Session], *, new: int) -> bool:
        """Have the rows of a session in the window, and columns for the `new` tokens so far; False if that is too much.

        Sessions that are not `needed` in this pass may have to leave.
        """
        cache, key = session.cache, id(session)
        if key in self._columns and self._revisions.get(session) != cache.revision:
            self._columns.leave(key)
        wanted = new if key in self._columns else cache.length + new
        if not cache.is_whole or cache.room_tokens == 0 or wanted > self._room(wanted, needed):
            self._columns.leave(key)
            return False
        if key not in self._columns:
            self._revisions.pop(session, None)  # until its rows are copied
            columns = self._columns.join(key, cache.length)
            for (_, group, theirs), (_, _, own) in zip(_attending(cache), _attending(self._cache), strict=True):
                shape = len(own.tensors), cache.length, group.geometry.width
                rows = np.empty(shape, own.dtype)
                theirs.copy_out(slice(None), group.strategy.held_rows(), rows)
                own.copy_in(slice(None), columns, rows)
                self.bytes_copied += rows.nbytes
        return True

    def _room(self, wanted: int, needed: Sequence[Session]) -> int:
        """Free columns, if need be after sessions left that do not run in this pass."""
        kept = {id(session) for session in needed}
        for key in self._columns.sequences:
            if self._columns.free >= wanted:
                break
            if key not in kept:
                self._columns.leave(key)
        return self._columns.free


def _attending(cache: KVCache) -> list[tuple[int, CacheGroup, Arena]]:
    """The arenas of the groups with attention, with their numbers in `arenas`."""
    pairs = ((group, arena) for group in cache.groups for arena in group.arenas)
    return [(at, group, arena) for at, (group, arena) in enumerate(pairs) if group in cache.row_groups]


def make_batch(graphs: Graphs, caches: CacheSetup) -> Batch:
    """What an engine needs for passes of several sequences.

    Raises:
        UsageError: the bundle or the engine cannot run several sequences in one pass.
        EngineError: the engine refused the verify graph.
    """
    manifest, fix = caches.manifest, "Leave it out; requests take turns then."
    if manifest.graph("verify") is None:
        refuse("batch", "a bundle without verify graphs", "verify graphs", "Export it with --draft-rows 8.")
    if manifest.model.delta_rule is not None:
        refuse("batch", "layers with gated delta rules", "layers whose past can be in one window", fix)
    if graphs.batch_invariance != "equal":
        found = "an engine whose sums depend on the columns of tokens"
        refuse("batch", found, "one that gives a token the same bits beside any others, such as htp", fix)
    if caches.growth is not None:
        refuse("batch", "a cache that grows", "memory of one size", fix)
    return Batch(graphs, caches.make_window())
