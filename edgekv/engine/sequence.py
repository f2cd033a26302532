"""A text that grows: its tokens, which of them its cache has, and the steps that run the others."""

from __future__ import annotations

from collections import abc
from time import perf_counter_ns
from typing import Any

from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.batch import Offer
from edgekv.engine.graphs import Graphs, StepTimes
from edgekv.engine.pool import SessionPool
from edgekv.engine.session import Session
from edgekv.engine.session_stats import CacheUse, SessionStats
from edgekv.engine.speculation import Speculation
from edgekv.kv import CacheStats
from edgekv.prefix import Prefixes, StoreStats
from edgekv.text.constraint import Constraint


class Sequence:
    """Prompt and output of one call, run in a session that the pool chooses for each step.

    Tokens are known once they are in a cache: run, reused or restored; `push` adds one that is not. `logits` runs what
    is not known, with drafts behind it if the call speculates. A session evicted in the meantime is recomputed from
    all tokens.

    Attributes:
        id: of the pool's session; None for the pool's own.
        tokens: prompt and output.
        known_tokens: how many of them are known.
        speculation: drafts tokens, so that a pass may bring several; None for one token a pass.
        stats: statistics so far.
    """

    def __init__(
        self,
        pool: SessionPool,
        graphs: Graphs,
        prompt: abc.Sequence[int],
        id: int | None = None,
        prefixes: Prefixes | None = None,
        adapter: BoundAdapter | None = None,
        *,
        speculation: Speculation | None = None,
        constraint: Constraint | None = None,
        max_new_tokens: int = 0,
    ) -> None:
        """Run nothing yet.

        Args:
            pool: the sessions.
            graphs: the graphs of the sessions.
            prompt: token ids.
            id: of the pool's session; None for the pool's own.
            prefixes: the prefix cache; None for none.
            adapter: what to compute with; None for the base model.
            speculation: see above.
            constraint: of the output, which drafts follow; None for free text.
            max_new_tokens: of the output; no draft goes beyond them.
        """
        held = pool.own.cache.stats
        self.id = id
        self.tokens = list(prompt)
        self.known_tokens = 0
        self.speculation = speculation
        self.stats = SessionStats(CacheUse(bytes_held=held.bytes_held, bytes_peak=held.peak_bytes))
        self._pool = pool
        self._graphs = graphs
        self._prefixes = prefixes
        self._adapter = adapter
        self._constraint = constraint
        self._prompt_tokens = len(prompt)
        self._most_tokens = len(prompt) + max_new_tokens
        self._drafting: Session | None = None  # whose last pass has drafts
        self._ready: NDArray[Any] | None = None  # from a pass of several sequences
        self._is_finished = False

    def prepare(self) -> None:
        """Allocate the cache and load the graphs, so that errors occur before any work.

        Raises:
            UsageError: the id is not a 64-bit integer.
            MemoryBudgetError: the cache does not fit.
            EngineError: the engine refused a graph.
        """
        self._pool.claim(self.id, self._prompt_tokens)
        self._graphs.prepare("decode", *(() if self.speculation is None else ("verify",)))
        self._graphs.prepare_prefill(self._prompt_tokens)

    def begin(self) -> None:
        """Start using the session; the pool's own is emptied."""
        if self.id is None:
            self._pool.own.reset()
            self._pool.own.adapt(self._adapter)
            self._graphs.use(self._pool.own.cache, self._adapter)

    # ------------------------------------------------------------------ the next logits

    @property
    def unknown_tokens(self) -> int:
        """Tokens that the next step has to run."""
        return len(self.tokens) - self.known_tokens

    @property
    def needs_pass(self) -> bool:
        """Whether the next logits need an inference."""
        return self._ready is None and not (self._drafting is not None and self._drafting.has_run(self._unknown))

    def push(self, token: int, ns: int = 0) -> None:
        """Continue the text with a token, which took so long to choose, ns."""
        if self.speculation is not None and len(self.tokens) > self._prompt_tokens:
            self.speculation.chose(ns)
        self.tokens.append(token)

    def prefill(self, most: int) -> bool:
        """Run the next `most` tokens of the prompt if more are left beyond those that the cache holds.

        `logits` runs the rest. If `most` is the largest AR, the steps are those of running the whole prompt at once; if
        sessions have a window, it is run instead of `most`.

        Returns:
            Whether more than `most` tokens are left.

        Raises:
            EdgeKVError: as `logits`.
        """
        if not self._pool.keeps(len(self.tokens)):
            return False
        if self.known_tokens == 0:
            self._start()
        if window := self._pool.own.window:
            most = window - self.known_tokens % window
        left = self.unknown_tokens
        if left > most:
            self._run(self.known_tokens + most)
        return left > 2 * most

    def logits(self) -> NDArray[Any]:
        """The logits after the text as integers `[V]`, valid until the next step.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: the sequence has grown beyond the threshold, and a cache for it does not fit.
        """
        ready, self._ready = self._ready, None
        if ready is not None:
            return ready
        if self.speculation is None or len(self.tokens) == self._prompt_tokens:
            return self._run(len(self.tokens))
        return self._run_with_drafts(self.speculation)

    def finish(self) -> None:
        """End the call, complete or interrupted: also store the end of the sequence in the prefix cache."""
        if self._is_finished:
            return
        self._is_finished = True
        if self.speculation is not None:
            self.speculation.end()
        self._settle()
        if self._prefixes is None or not self.known_tokens:
            return
        session = self._pool.touch(self.id)
        if session is not None and session.writer is self:
            self._prefixes.end(session.cache, session.tokens, session.stable_tokens)

    @property
    def prefix_stats(self) -> StoreStats | None:
        """Statistics of the prefix cache; None if there is none."""
        return None if self._prefixes is None else self._prefixes.stats

    # ------------------------------------------------------------------ a pass of several sequences

    def offer(self) -> Offer | None:
        """What a pass of several sequences can run; None if this one needs none, or one of its own."""
        is_single = self._ready is None and self.speculation is None and self.unknown_tokens == 1
        if not is_single or not self._pool.keeps(len(self.tokens)):
            return None
        session = self._pool.touch(self.id)
        return Offer(session, self.tokens[-1]) if session is not None and self._holds(session) else None

    def receive(self, offer: Offer, logits: NDArray[Any], before: CacheStats, times: StepTimes) -> None:
        """Take the logits of such a pass.

        Args:
            offer: what has run.
            logits: `[V]`, its own copy.
            before: statistics of the session's cache before the pass.
            times: this sequence's share of the pass.
        """
        self.known_tokens += 1
        self._keep(offer.session)
        self.stats.add(offer.session.cache, times, before, 1)
        self._ready = logits

    # ------------------------------------------------------------------ plain steps

    @property
    def _unknown(self) -> list[int]:
        return self.tokens[self.known_tokens :]

    def _run(self, end: int) -> NDArray[Any]:
        """Run the tokens before `end` that no cache has; the logits of the last one."""
        self._settle()
        known, text = self.known_tokens, self.tokens[:end]
        session = self._place(end)
        restored = 0
        if not self._pool.keeps(end):
            session.reset()
            start = len(session.tokens)
        elif self._holds(session):
            start = known
        else:
            start, restored = self._recall(session, text[: self._prompt_tokens] if session.window else text)
        self.known_tokens = end
        times, before = self._graphs.times, session.cache.stats
        session.writer = self
        new = text[start:]
        try:
            if session.window and start < known:
                return self._feed_again(session, text)
            return self._feed(session, new)
        finally:
            if known == 0:
                self.stats.cache.reused_tokens, self.stats.cache.restored_tokens = start, restored
            self.stats.add(session.cache, self._graphs.times - times, before, len(new))

    def _feed(self, session: Session, tokens: abc.Sequence[int]) -> NDArray[Any]:
        """Run tokens; full blocks are stored before layers with an attention window drop them."""
        if not tokens or self._prefixes is None:
            return session.feed(tokens)
        piece = session.cache.ar[-1] if len(session.cache.groups) > 1 else len(tokens)
        for at in range(0, len(tokens), piece):
            logits = session.feed(tokens[at : at + piece])
            self._keep(session)
        return logits

    def _feed_again(self, session: Session, text: abc.Sequence[int]) -> NDArray[Any]:
        """Run what an evicted session had, in the steps that it had it from: the prompt, then token by token."""
        if rest := text[len(session.tokens) : self._prompt_tokens]:
            logits = self._feed(session, rest)
        for token in text[self._prompt_tokens :]:
            logits = self._feed(session, [token])
        return logits

    def _keep(self, session: Session) -> None:
        """Store the blocks that have become full."""
        if self._prefixes is not None:
            self._prefixes.keep(session.cache, session.tokens, session.stable_tokens)

    def _holds(self, session: Session) -> bool:
        """Whether the session holds exactly the known tokens, as this call left them."""
        return session.writer is self and not session.cache.dirty and session.cache.tokens_seen == self.known_tokens

    def _place(self, tokens: int) -> Session:
        """The session for the next step, with the adapter; see `SessionPool.place`."""
        session = self._pool.place(self.id, tokens)
        session.adapt(self._adapter)
        return session

    def _start(self) -> None:
        """Find what the cache and the prefix cache have of the prompt."""
        session = self._place(len(self.tokens))
        start, restored = self._recall(session, self.tokens)
        self.known_tokens = start
        session.writer = self
        self.stats.cache.reused_tokens, self.stats.cache.restored_tokens = start, restored

    def _recall(self, session: Session, tokens: list[int]) -> tuple[int, int]:
        """How many of these tokens the session has, and how many of those were restored."""
        start = session.reuse(tokens)
        if self._prefixes is None or start >= len(tokens) - 1:
            return start, 0
        try:
            end = self._prefixes.restore(session.cache, tokens, start)
        except BaseException:
            session.reset()
            raise
        if end > start:
            session.adopt(tokens[:end], end)
        return end, end - start

    # ------------------------------------------------------------------ passes with drafts

    def _run_with_drafts(self, speculation: Speculation) -> NDArray[Any]:
        known = self.known_tokens
        logits = self._take_drafts()
        speculation.accept(self.tokens[known : self.known_tokens])
        if logits is not None:
            return logits
        useful = self._most_tokens - len(self.tokens) - 1
        drafts = self._propose(speculation, min(self._draft_room(), useful))
        started = perf_counter_ns()
        logits = self._verify(drafts) if len(drafts) else self._run(len(self.tokens))
        speculation.ran(self._graphs.last_ar, drafts, perf_counter_ns() - started)
        return logits

    def _take_drafts(self) -> NDArray[Any] | None:
        """The logits after the text, if the last pass has run the rest of it as drafts; otherwise None.

        The tokens that it has run are known from then on, in both cases.
        """
        session, unknown = self._drafting, self._unknown
        if session is None or not self._runs_as_drafts or not (right := session.take(unknown)):
            return None
        self.known_tokens += right
        self.stats.add_room(-right)
        return session.pass_logits if right == len(unknown) else None

    def _propose(self, speculation: Speculation, room: int) -> DraftTree:
        """What the next pass checks, at most `room` tokens."""
        drafts = speculation.propose(self.tokens, room, self._graphs.vocab)
        if self._constraint is not None and len(drafts):
            return DraftTree.chain(self._constraint.continued(drafts.trunk().tokens, room))
        # Rows of branches are in other columns than in single steps.
        return drafts if self._graphs.row_bits == "equal" else drafts.trunk()

    def _draft_room(self) -> int:
        """The most drafts that a pass takes behind the text; 0 if only a plain step can run what is not known.

        It is 0 where the sequence is recomputed in every step, where the context has no room for a verify graph, and
        where this graph would not give the bits of a plain step.
        """
        self._settle()
        if not self._runs_as_drafts or not self._pool.keeps(self.known_tokens):
            return 0
        session = self._pool.touch(self.id)
        room = session.draft_room if session is not None and self._holds(session) else 0
        return max(0, room - self.unknown_tokens)

    def _verify(self, drafts: DraftTree) -> NDArray[Any]:
        """Run what is not known, and drafts behind it."""
        session, tokens = self._pool.touch(self.id), self._unknown
        assert session is not None and self._holds(session), "there is room for drafts"
        times, before = self._graphs.times, session.cache.stats
        try:
            logits = session.verify(tokens, drafts)
            self.known_tokens = len(self.tokens)
            self._drafting = session
            return logits
        finally:
            self.stats.add(session.cache, self._graphs.times - times, before, len(tokens) + len(drafts))
            self.stats.add_room(-len(tokens))

    @property
    def _runs_as_drafts(self) -> bool:
        """Whether a verify graph gives the bits of the graph for these tokens: two or more are run as a prompt."""
        return self.unknown_tokens == 1 or self._graphs.row_bits == "equal"

    def _settle(self) -> None:
        """Close the pass that has drafts, if there is one; see `Session.settle`."""
        session, self._drafting = self._drafting, None
        if session is None:
            return
        before = session.cache.stats
        session.settle()
        self.stats.add(session.cache, StepTimes(), before, 0)
        if session.cache.tokens_seen == len(session.tokens):
            self._keep(session)
