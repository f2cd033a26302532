"""Runs what sequences need next: pieces of prompts, single tokens, and tokens with drafts behind them."""

from __future__ import annotations

from collections import abc
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.engine.pool import SessionPool
from edgekv.engine.sequence import Sequence
from edgekv.engine.session import Graphs, Session
from edgekv.engine.speculation import SpeculationRun
from edgekv.runtime import StepTimes


class Runner:
    """Brings sequences into caches and gives their next logits."""

    def __init__(self, pool: SessionPool, graphs: Graphs) -> None:
        """Args: pool: the sessions. graphs: of the sessions."""
        self._pool = pool
        self._graphs = graphs
        self._keeps = pool.keeps
        self._recomputes = pool.mode.recomputed_tokens != 0  # any
        self._unkept: Sequence | None = None

    def begin(self, sequence: Sequence) -> None:
        """Allocate its cache and load its graphs, so that errors occur before any work; the engine's own is emptied.

        Raises:
            UsageError: the id of its cache is not a 64-bit integer.
            MemoryBudgetError: the cache does not fit.
            EngineError: the engine refused a graph.
        """
        self._keep_last()
        own = self._pool.own
        if sequence.request.params is not None:
            self._pool.claim(sequence.cache, sequence.prompt_tokens)
            self._graphs.prepare("decode", *(() if sequence.speculation is None else ("verify",)))
            self._graphs.prepare_prefill(sequence.prompt_tokens)
        if sequence.request.scores:
            self._graphs.prepare("score", "decode")
        held = own.cache.stats
        sequence.own_use.bytes_held, sequence.own_use.bytes_peak = held.bytes_held, held.peak_bytes
        sequence.has_begun = True
        if sequence.cache is None or sequence.request.scores:
            own.reset()
            own.adapt(sequence.adapter)
            self._graphs.use(own.cache, sequence.adapter)
        if sequence.request.scores:
            sequence.unscored = sequence.tokens[len(own.tokens) :]

    def finish(self, sequence: Sequence) -> None:
        """End it, complete or interrupted: the end of its text is stored in the prefix cache."""
        if sequence.speculation is not None:
            sequence.speculation.end()
        self._keep_last()
        self._settle(sequence)
        session = sequence.session
        if session is None or session.writer is not sequence:
            return
        session.count()
        session.is_busy = False
        if sequence.prefixes is not None and sequence.known_tokens:
            sequence.prefixes.end(session.cache, session.tokens, session.stable_tokens)

    # ------------------------------------------------------------------ logits

    def score(self, sequence: Sequence) -> NDArray[Any]:
        """The logits after the next tokens of a prompt as integers `[rows, V]`, first those of the sink.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        left, session = sequence.unscored, self._pool.own
        assert left is not None, "some are left"
        rows: list[NDArray[Any]] = []
        if session.cache.sink is not None and session.is_empty:
            rows.append(session.cache.sink.logits)
        piece = left[: self._graphs.most("score")]
        if piece:
            session.feed(piece, "score", lambda logits: rows.append(logits.copy()))
        sequence.unscored = left[len(piece) :] or None
        return np.concatenate(rows)

    def prefill(self, sequence: Sequence, most: int) -> None:
        """Run the next `most` tokens of its prompt if more are left beyond those that the cache holds.

        `run` runs the rest. If `most` is the largest AR, the steps are those of running the whole prompt at once; if
        sessions have a window, it is run instead of `most`. Once no more than `most` are left, it is prefilled.

        Raises:
            EdgeKVError: as `run`.
        """
        left = 0
        if self._keeps(len(sequence.tokens)):
            if sequence.known_tokens == 0:
                _, sequence.known_tokens = self._enter(sequence, sequence.tokens)
            if window := self._pool.own.window:
                most = window - sequence.known_tokens % window
            left = len(sequence.tokens) - sequence.known_tokens
            if left > most:
                self.run(sequence, sequence.known_tokens + most)
        sequence.is_prefilled = left <= 2 * most

    def run(self, sequence: Sequence, end: int | None = None) -> NDArray[Any]:
        """Run the tokens before `end` that no cache has.

        Args:
            sequence: to run.
            end: of the text; None for all tokens.

        Returns:
            The logits of the last of all tokens as integers `[V]`, valid until the next step; before it, any.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: the sequence has grown beyond the threshold, and a cache for it does not fit.
        """
        self._keep_last()
        if sequence.drafting is not None:
            self._settle(sequence)
        known, session = sequence.known_tokens, sequence.session
        text = sequence.tokens if end is None else sequence.tokens[:end]
        if session is None or not self._holds(session, sequence):
            session, start = self._enter(sequence, text)
        else:
            start = known
        sequence.known_tokens = len(text)
        clock = self._graphs.clock
        steps, run_ns, host_ns = clock.steps, clock.run_ns, clock.host_ns
        try:
            if session.window and start < known:
                return self._feed_again(sequence, session, text)
            new = text[start:]
            if sequence.prefixes is None or (sequence.output is not None and len(session.cache.groups) == 1):
                self._unkept = None if sequence.prefixes is None else sequence
                return session.feed(new, logits=end is None)
            return self._feed(sequence, session, new, logits=end is None)
        finally:
            sequence.own_use.computed_tokens += len(text) - start
            sequence.room_tokens = session.cache.room_tokens
            times = sequence.times
            times.steps += clock.steps - steps
            times.run_ns += clock.run_ns - run_ns
            times.host_ns += clock.host_ns - host_ns
            if self._recomputes and not self._keeps(len(text)):  # the next step recomputes it
                session.count()
                sequence.session = None

    def held_session(self, sequence: Sequence) -> Session | None:
        """The session that holds exactly what is known of a text, as its last step left it; None if there is none."""
        session = sequence.session
        return session if session is not None and self._holds(session, sequence) else None

    def can_share(self, sequence: Sequence) -> bool:
        """Whether its next token can run in a pass of several sequences."""
        is_single = len(sequence.tokens) - sequence.known_tokens == 1 and sequence.speculation is None
        return is_single and self._keeps(len(sequence.tokens))

    def took_part(self, sequence: Sequence, session: Session, share: StepTimes) -> None:
        """Note that a pass of several sequences has run its next token.

        Args:
            sequence: one of them.
            session: of it.
            share: of the pass.
        """
        sequence.known_tokens += 1
        sequence.times += share
        sequence.own_use.computed_tokens += 1
        sequence.room_tokens = session.cache.room_tokens
        self._keep(sequence, session)

    # ------------------------------------------------------------------ plain steps

    def _enter(self, sequence: Sequence, text: list[int]) -> tuple[Session, int]:
        """The session for the next step of a text, and how much of the text it has; it holds nothing else."""
        self._keep_last()
        session = self._pool.place(sequence.cache, len(text))
        session.adapt(sequence.adapter)
        start = restored = 0
        if not self._keeps(len(text)):
            session.reset()
            start = len(session.tokens)
        else:
            prompt = sequence.prompt_tokens
            start, restored = self._recall(sequence, session, text[:prompt] if session.window else text)
        if sequence.known_tokens == 0:
            sequence.own_use.reused_tokens, sequence.own_use.restored_tokens = start, restored
        session.lend(sequence, sequence.own_use)
        return session, start

    def _feed(
        self, sequence: Sequence, session: Session, tokens: abc.Sequence[int], *, logits: bool = True
    ) -> NDArray[Any]:
        """Run tokens; full blocks are stored before layers with an attention window drop them."""
        if not tokens or sequence.prefixes is None:
            return session.feed(tokens, logits=logits)
        piece = session.cache.ar[-1] if len(session.cache.groups) > 1 else len(tokens)
        for at in range(0, len(tokens), piece):
            found = session.feed(tokens[at : at + piece], logits=logits and at + piece >= len(tokens))
            self._keep(sequence, session)
        return found

    def _feed_again(self, sequence: Sequence, session: Session, text: abc.Sequence[int]) -> NDArray[Any]:
        """Run what an evicted session had, in the steps that it had it from: the prompt, then token by token."""
        prompt = sequence.prompt_tokens
        if rest := text[len(session.tokens) : prompt]:
            logits = self._feed(sequence, session, rest)
        for token in text[prompt:]:
            logits = self._feed(sequence, session, [token])
        return logits

    def _keep_last(self) -> None:
        """Store the blocks that the last plain step has filled: after its logits were used, before anything else."""
        if self._unkept is None:
            return
        sequence, self._unkept = self._unkept, None
        session = sequence.session
        if session is not None and session.writer is sequence:
            self._keep(sequence, session)

    def _keep(self, sequence: Sequence, session: Session) -> None:
        """Store the blocks that have become full."""
        if sequence.prefixes is not None:
            sequence.prefixes.keep(session.cache, session.tokens, session.stable_tokens)

    def _holds(self, session: Session, sequence: Sequence) -> bool:
        """Whether the session holds exactly the known tokens, as this sequence left them."""
        cache = session.cache
        return session.writer is sequence and not cache.dirty and cache.tokens_seen == sequence.known_tokens

    def _recall(self, sequence: Sequence, session: Session, tokens: list[int]) -> tuple[int, int]:
        """How many of these tokens the session has, and how many of those were restored."""
        start = session.reuse(tokens)
        if sequence.prefixes is None or start >= len(tokens) - 1:
            return start, 0
        try:
            end = sequence.prefixes.restore(session.cache, tokens, start)
        except BaseException:
            session.reset()
            raise
        if end > start:
            session.adopt(tokens[:end], end)
        return end, end - start

    # ------------------------------------------------------------------ passes with drafts

    def run_with_drafts(self, sequence: Sequence, speculation: SpeculationRun) -> NDArray[Any]:
        """As `run`, with drafts behind the text: the next calls may find that their tokens have run.

        Raises:
            EdgeKVError: as `run`.
        """
        known = sequence.known_tokens
        logits = self._take_drafts(sequence)
        speculation.accept(sequence.tokens[known : sequence.known_tokens])
        if logits is not None:
            return logits
        drafts = self._propose(sequence, speculation)
        started = perf_counter_ns()
        logits = self._verify(sequence, drafts) if len(drafts) else self.run(sequence)
        speculation.ran(self._graphs.last_ar, drafts, perf_counter_ns() - started)
        return logits

    def _take_drafts(self, sequence: Sequence) -> NDArray[Any] | None:
        """The logits after the text, if the last pass has run the rest of it as drafts; otherwise None.

        The tokens that it has run are known from then on, in both cases.
        """
        session, unknown = sequence.drafting, sequence.unknown
        if session is None or not self._runs_as_drafts(sequence) or not (right := session.take(unknown)):
            return None
        sequence.known_tokens += right
        sequence.count_rows(right)
        return session.pass_logits if right == len(unknown) else None

    def _propose(self, sequence: Sequence, speculation: SpeculationRun) -> DraftTree:
        """What the next pass checks."""
        room = min(self._draft_room(sequence), sequence.most_tokens - len(sequence.tokens) - 1)
        drafts = speculation.propose(sequence.tokens, room, self._graphs.vocab)
        constraint = None if sequence.output is None else sequence.output.constraint
        if constraint is not None and len(drafts):
            return DraftTree.chain(constraint.continued(drafts.trunk().tokens, room))
        # Rows of branches are in other columns than in single steps.
        return drafts if self._graphs.row_bits == "equal" else drafts.trunk()

    def _draft_room(self, sequence: Sequence) -> int:
        """The most drafts that a pass takes behind the text; 0 if only a plain step can run what is not known.

        It is 0 where the sequence is recomputed in every step, where the context has no room for a verify graph, and
        where this graph would not give the bits of a plain step.
        """
        self._settle(sequence)
        if not self._runs_as_drafts(sequence) or not self._keeps(sequence.known_tokens):
            return 0
        session = self.held_session(sequence)
        room = 0 if session is None else session.draft_room
        return max(0, room - len(sequence.tokens) + sequence.known_tokens)

    def _verify(self, sequence: Sequence, drafts: DraftTree) -> NDArray[Any]:
        """Run what is not known, and drafts behind it."""
        self._keep_last()
        session, tokens = self.held_session(sequence), sequence.unknown
        assert session is not None, "there is room for drafts"
        times = self._graphs.times
        try:
            logits = session.verify(tokens, drafts)
            sequence.known_tokens = len(sequence.tokens)
            sequence.drafting = session
            return logits
        finally:
            sequence.times += self._graphs.times - times
            sequence.own_use.computed_tokens += len(tokens) + len(drafts)
            sequence.room_tokens = session.cache.room_tokens
            sequence.count_rows(len(tokens))

    def _runs_as_drafts(self, sequence: Sequence) -> bool:
        """Whether a verify graph gives the bits of the graph for these tokens: two or more are run as a prompt."""
        return len(sequence.tokens) - sequence.known_tokens == 1 or self._graphs.row_bits == "equal"

    def _settle(self, sequence: Sequence) -> None:
        """Close the pass that has drafts, if there is one; see `Session.settle`."""
        session, sequence.drafting = sequence.drafting, None
        if session is None:
            return
        session.settle()
        sequence.room_tokens = session.cache.room_tokens
        if session.cache.tokens_seen == len(session.tokens):
            self._keep(sequence, session)
