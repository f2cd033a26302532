"""Runs the tokens of one call in a session: they are reused, restored, computed and stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.kv import CacheStats
from edgekv.prefix import Prefixes, StoreStats
from edgekv.session.adapters import BoundAdapter
from edgekv.session.graphs import Graphs, StepTimes
from edgekv.session.pool import SessionPool
from edgekv.session.session import Session
from edgekv.session.session_stats import SessionStats


class Request:
    """Feeds one sequence to the sessions of a pool; the pool chooses the session of each step.

    A session evicted in the meantime is recomputed from all tokens.

    Attributes:
        sequence: the id; None for the pool's own session.
        stats: statistics so far.
    """

    def __init__(
        self,
        pool: SessionPool,
        graphs: Graphs,
        sequence: int | None = None,
        prefixes: Prefixes | None = None,
        adapter: BoundAdapter | None = None,
    ) -> None:
        """Prepare to feed a sequence.

        Args:
            pool: the sessions.
            graphs: the graphs of the sessions, for the times.
            sequence: the id; None for the pool's own session.
            prefixes: the prefix cache; None for none.
            adapter: what to compute with; None for the base model.
        """
        held = pool.own.cache.stats
        self.stats = SessionStats(bytes_held=held.bytes_held, peak_bytes=held.peak_bytes)
        self._pool = pool
        self._graphs = graphs
        self.sequence = sequence
        self._prefixes = prefixes
        self._adapter = adapter
        self._tokens: list[int] = []
        self._drafting: Session | None = None  # whose last pass has drafts
        self._is_finished = False

    @property
    def known_tokens(self) -> int:
        """Tokens fed so far, including those that were not run because the cache had them."""
        return len(self._tokens)

    @property
    def vocab(self) -> int:
        """Number of the model's logits."""
        return self._graphs.vocab

    @property
    def ar(self) -> int:
        """AR of the graph that ran last."""
        return self._graphs.last_ar

    @property
    def prefix_stats(self) -> StoreStats | None:
        """Statistics of the prefix cache; None if there is none."""
        return None if self._prefixes is None else self._prefixes.stats

    def prepare(self, prompt_tokens: int, *, drafts: bool = False) -> None:
        """Allocate the cache and load the graphs for a prompt, so that errors occur before any work.

        Args:
            prompt_tokens: its length.
            drafts: whether to load the graphs that verify drafts too.

        Raises:
            UsageError: the id is not a 64-bit integer.
            MemoryBudgetError: the cache does not fit.
            EngineError: the engine refused a graph.
        """
        self._pool.claim(self.sequence, prompt_tokens)
        self._graphs.prepare("decode", *(("verify",) if drafts else ()))
        self._graphs.prepare_prefill(prompt_tokens)

    def begin(self) -> None:
        """Start using the sequence; the pool's own session is emptied."""
        if self.sequence is None:
            self._pool.own.reset()
            self._pool.own.adapt(self._adapter)
            self._graphs.use(self._pool.own.cache, self._adapter)

    def prefill(self, prompt: Sequence[int], most: int) -> bool:
        """Run the next `most` tokens of the prompt if more are left beyond those that the cache holds.

        `feed` runs the rest. If `most` is the largest AR, the steps are those of feeding the whole prompt at once.

        Returns:
            Whether more than `most` tokens are left.

        Raises:
            EdgeKVError: as `feed`.
        """
        if not self._pool.keeps(len(prompt)):
            return False
        if not self._tokens:
            self._start(prompt)
        known = len(self._tokens)
        if len(prompt) - known > most:
            self.feed(prompt[known : known + most])
        return len(prompt) - known > 2 * most

    def feed(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Run the next tokens and return the logits of the last one as integers `[V]`, valid until the next step.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: the sequence has grown beyond the threshold, and a cache for it does not fit.
        """
        self._settle()
        known = len(self._tokens)
        self._tokens += tokens
        session = self._place(len(self._tokens))
        restored = 0
        if not self._pool.keeps(len(self._tokens)):
            session.reset()
            start = len(session.tokens)
        elif self._holds(session, known):
            start = known
        else:
            start, restored = self._recall(session)
        times, before = self._graphs.times, session.cache.stats
        session.writer = self
        new = self._tokens[start:]
        try:
            return session.feed(new) if self._prefixes is None else self._run(session, new, self._prefixes)
        finally:
            if known == 0:
                self.stats.reused_tokens, self.stats.restored_tokens = start, restored
            self.stats.add(session.cache, self._graphs.times - times, before, len(new))

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may branch: rows of branches are in other columns than in single steps."""
        return self._graphs.row_bits == "equal"

    def draft_room(self, tokens: int) -> int:
        """The most drafts that `verify` takes behind the next `tokens` tokens; 0 if only `feed` can run them.

        It is 0 where the sequence is recomputed in every step, where the context has no room for a verify graph, and
        where this graph would not give the bits of `feed`.
        """
        self._settle()
        if not self._runs_as_drafts(tokens):
            return 0
        session = self._pool.touch(self.sequence) if self._pool.keeps(len(self._tokens)) else None
        room = session.draft_room if session is not None and self._continues(session) else 0
        return max(0, room - tokens)

    def verify(self, tokens: Sequence[int], drafts: DraftTree) -> NDArray[Any]:
        """Run the next tokens, and behind them drafts; return the logits of the last token as `feed` does.

        Args:
            tokens: at least one.
            drafts: at most `draft_room` of them. They become tokens with `take`.

        Raises:
            EngineError: the runtime failed.
        """
        self._settle()
        session = self._pool.touch(self.sequence)
        assert session is not None and self._continues(session), "draft_room says so"
        times, before = self._graphs.times, session.cache.stats
        try:
            logits = session.verify(tokens, drafts)
            self._tokens += tokens
            self._drafting = session
            return logits
        finally:
            self.stats.add(session.cache, self._graphs.times - times, before, len(tokens) + len(drafts))
            self.stats.add_room(-len(tokens))

    def take(self, tokens: Sequence[int]) -> NDArray[Any] | None:
        """The logits after the next tokens, if they are drafts that the last pass has run; otherwise None.

        Those that it has run are known from then on, in both cases; see `known_tokens`.
        """
        session = self._drafting
        if session is None or not self._runs_as_drafts(len(tokens)) or not (right := session.take(tokens)):
            return None
        self._tokens += tokens[:right]
        self.stats.add_room(-right)
        return session.pass_logits if right == len(tokens) else None

    def has_run(self, tokens: Sequence[int]) -> bool:
        """Whether `take` has the logits after these next tokens."""
        return self._drafting is not None and self._drafting.has_run(tokens)

    def batched(self, tokens: int) -> Session | None:
        """The session that a `Batch` may advance by the next `tokens` tokens; None if only `feed` can run them."""
        self._settle()
        if tokens != 1 or not self._pool.keeps(len(self._tokens) + 1):
            return None
        session = self._pool.touch(self.sequence)
        return session if session is not None and self._continues(session) else None

    def ran(self, token: int, session: Session, before: CacheStats, times: StepTimes) -> None:
        """Note a token that a `Batch` ran.

        Args:
            token: its id.
            session: which it was appended to.
            before: statistics of the session's cache before the pass.
            times: this token's share of the pass.
        """
        self._tokens.append(token)
        if self._prefixes is not None:
            self._prefixes.keep(session.cache, session.tokens)
        self.stats.add(session.cache, times, before, 1)

    def finish(self) -> None:
        """End the call, complete or interrupted: also store the end of the sequence in the prefix cache."""
        if self._is_finished:
            return
        self._is_finished = True
        self._settle()
        if self._prefixes is None or not self._tokens:
            return
        session = self._pool.touch(self.sequence)
        if session is not None and session.writer is self:
            self._prefixes.end(session.cache, session.tokens)

    def _runs_as_drafts(self, tokens: int) -> bool:
        """Whether a verify graph gives the bits of the graph for `tokens` tokens: two or more are run as a prompt."""
        return tokens == 1 or self._graphs.row_bits == "equal"

    def _continues(self, session: Session) -> bool:
        """Whether the session holds exactly the tokens so far, as this call left them."""
        return self._holds(session, len(self._tokens))

    def _holds(self, session: Session, tokens: int) -> bool:
        """Whether the session holds this many tokens, as this call left them."""
        return session.writer is self and not session.cache.dirty and session.cache.tokens_seen == tokens

    def _settle(self) -> None:
        """Close the pass that has drafts, if there is one; see `Session.settle`."""
        session, self._drafting = self._drafting, None
        if session is None:
            return
        before = session.cache.stats
        session.settle()
        self.stats.add(session.cache, StepTimes(), before, 0)
        if self._prefixes is not None and session.cache.tokens_seen == len(session.tokens):
            self._prefixes.keep(session.cache, session.tokens)

    def _place(self, tokens: int) -> Session:
        """The session for the next step, with the adapter; see `SessionPool.place`."""
        session = self._pool.place(self.sequence, tokens)
        session.adapt(self._adapter)
        return session

    def _start(self, prompt: Sequence[int]) -> None:
        """Find what the cache and the prefix cache have of a prompt."""
        session = self._place(len(prompt))
        self._tokens = list(prompt)
        start, restored = self._recall(session)
        del self._tokens[start:]
        session.writer = self
        self.stats.reused_tokens, self.stats.restored_tokens = start, restored

    def _recall(self, session: Session) -> tuple[int, int]:
        """Number of tokens of the sequence in the session, and how many of these were restored."""
        start = session.reuse(self._tokens)
        if self._prefixes is None or start >= len(self._tokens) - 1:
            return start, 0
        try:
            end = self._prefixes.restore(session.cache, self._tokens, start)
        except BaseException:
            session.reset()
            raise
        if end > start:
            session.adopt(self._tokens[:end])
        return end, end - start

    def _run(self, session: Session, tokens: Sequence[int], prefixes: Prefixes) -> NDArray[Any]:
        """Run tokens; full blocks are stored before layers with an attention window drop them."""
        if not tokens:
            return session.feed(tokens)
        piece = session.cache.ar[-1] if len(session.cache.groups) > 1 else len(tokens)
        for at in range(0, len(tokens), piece):
            logits = session.feed(tokens[at : at + piece])
            prefixes.keep(session.cache, session.tokens)
        return logits
