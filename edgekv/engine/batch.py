"""Several sequences in one pass: a token of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from numpy.typing import NDArray

from edgekv.engine.caches import CacheSetup
from edgekv.engine.rows import SequenceRows
from edgekv.engine.session import Graphs, Session
from edgekv.errors import refuse
from edgekv.kv import KVCache


class Batch:
    """Advances several sessions in one pass of the largest verify graph: a row for each, which sees its own past alone.

    The past of all of them is in one window, in the same columns of every layer: as many as the layers with the
    smallest window have. A session's rows are copied into it when it joins, and again after a step without the batch;
    each new row is written to both. States are an input of the pass: the rows that the next token reads are copied each
    time. Sessions that find no column run by themselves.

    Attributes:
        most: sessions of a pass at most.
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
        graph = graphs.largest_verify()
        with cache.hold(cache.geometry.context - graph.ar):
            pass  # no row is read before one is written
        self._rows = SequenceRows(graphs, graph, cache)
        self.most = self._rows.most
        self._revisions: WeakKeyDictionary[Session, int] = WeakKeyDictionary()

    @property
    def passes(self) -> int:
        """Passes run."""
        return self._rows.passes

    @property
    def rows(self) -> int:
        """Tokens that they brought."""
        return self._rows.rows

    @property
    def bytes_copied(self) -> int:
        """Bytes copied into the window, by sessions that joined."""
        return self._rows.shared.bytes_joined

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
        logits: list[NDArray[Any] | None] = [None] * len(sessions)
        placed: list[int] = []
        for at, session in enumerate(sessions):
            if self._place(session, sessions, new=len(placed) + 1):
                placed.append(at)
        if not placed:
            return logits
        running, new = [sessions[at] for at in placed], [tokens[at] for at in placed]
        states = [session.cache.newest_states for session in running]
        offsets = [session.position - session.cache.position for session in running]
        rows = self._rows.run([id(session) for session in running], new, sessions[0].adapter, states, offsets)
        for row, (at, session) in enumerate(zip(placed, running, strict=True)):
            session.append(tokens[at], self._rows.new(row))
            self._rows.keep(row, id(session))
            self._revisions[session] = session.cache.revision
            logits[at] = rows[row].copy()
        return logits

    def _place(self, session: Session, needed: Sequence[Session], *, new: int) -> bool:
        """Have the rows of a session in the window, and columns for the `new` tokens so far; False if that is too much.

        Sessions that are not `needed` in this pass may have to leave.
        """
        cache, key, table = session.cache, id(session), self._rows.shared.table
        if key in table and self._revisions.get(session) != cache.revision:
            table.leave(key)
        columns = new if key in table else cache.length + new
        if not cache.is_whole or cache.room_tokens == 0 or columns > self._room(columns, needed):
            table.leave(key)
            return False
        if key not in table:
            self._revisions.pop(session, None)  # until its rows are copied
            self._rows.shared.join(key, cache)
        return True

    def _room(self, columns: int, needed: Sequence[Session]) -> int:
        """Free columns, if need be after sessions left that do not run in this pass."""
        table, kept = self._rows.shared.table, {id(session) for session in needed}
        for key in table.sequences:
            if table.free >= columns:
                break
            if key not in kept:
                table.leave(key)
        return table.free


def make_batch(graphs: Graphs, caches: CacheSetup) -> Batch:
    """What an engine needs for passes of several sequences.

    Raises:
        UsageError: the bundle or the engine cannot run several sequences in one pass.
        EngineError: the engine refused the verify graph.
    """
    manifest, fix = caches.manifest, "Leave it out; requests take turns then."
    if manifest.graph("verify") is None:
        refuse("batch", "a bundle without verify graphs", "verify graphs", "Export it with --draft-rows 8.")
    if (rule := manifest.model.delta_rule) is not None:
        refuse("batch", f"layers with {rule.noun}", "layers whose past can be in one window", fix)
    if graphs.batch_invariance != "equal":
        got = "an engine whose sums depend on the columns of tokens"
        refuse("batch", got, "one that gives a token the same bits beside any others, such as htp", fix)
    if caches.allocation.growth is not None:
        refuse("batch", "a cache that grows", "memory of one size", fix)
    return Batch(graphs, caches.make_window())
