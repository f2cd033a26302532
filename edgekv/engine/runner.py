"""Runs rows of sequences in the sessions of a pool: what is reused, restored, computed and stored of each text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Tokens
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Role
from edgekv.draft import DraftTree
from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.batch import Batch
from edgekv.engine.beams import BeamResult
from edgekv.engine.pool import SessionPool
from edgekv.engine.request import DEFAULT_CACHE
from edgekv.engine.sequence import Scores, Sequence, Status
from edgekv.engine.session import Graphs, Session
from edgekv.engine.speculation import SpeculationRun
from edgekv.runtime import StepTimes
from edgekv.text.texts import Texts
from quant import Encoding


class Runner:
    """Runs what sequences need next, one after another or several in one pass. Who is next, the engine decides."""

    def __init__(self, pool: SessionPool, graphs: Graphs, texts: Texts, encoding: Encoding) -> None:
        """Run nothing yet.

        Args:
            pool: the sessions.
            graphs: extend them.
            texts: turns tokens into text.
            encoding: of the logits.
        """
        self._pool = pool
        self._graphs = graphs
        self._texts = texts
        self._encoding = encoding
        self._recomputes = not pool.mode.keeps_all
        self._unkept: Sequence | None = None  # whose last step may have filled blocks that are not in the prefix cache

    # ------------------------------------------------------------------ begin and end

    def begin(self, sequence: Sequence) -> None:
        """Allocate its cache and load its graphs, so that errors occur before any work; the default one is emptied.

        Raises:
            MemoryBudgetError: the cache does not fit.
            EngineError: the engine refused a graph.
        """
        self._keep_last()
        default, request = self._pool.default, sequence.request
        assert sequence.cache is not None, "it has a cache"
        if request.is_pooled:
            self._pool.claim(sequence.cache, sequence.prompt_tokens)
            if request.branches and self._graphs.reads_whole_texts:
                self._graphs.shortest(request.read_tokens)
            self._graphs.prepare(*_roles(sequence, self._graphs))
            self._graphs.prepare_prompt("prefill", sequence.prompt_tokens)
        if request.scores:
            sink = default.cache.sink
            self._graphs.prepare_prompt(
                self._graphs.scoring_role, sequence.prompt_tokens - (0 if sink is None else len(sink.tokens))
            )
        held = default.cache.stats
        sequence.own_use.bytes_held, sequence.own_use.bytes_peak = held.bytes_held, held.peak_bytes
        sequence.status = Status.PREFILLING
        if sequence.cache == DEFAULT_CACHE or request.scores:
            default.reset()
            default.adapt(sequence.adapter)
            self._graphs.use(default.cache, sequence.adapter)
        if request.scores:
            sequence.unscored = sequence.tokens[len(default.tokens) :]

    def finish(self, sequence: Sequence) -> None:
        """End it, complete or interrupted: the end of its text is stored in the prefix cache."""
        if sequence.speculation is not None:
            sequence.speculation.finish()
        self._keep_last()
        self._settle(sequence)
        session, sequence.session = sequence.session, None
        if session is None or session.writer is not sequence:
            return
        session.count()
        if sequence.prefixes is not None and sequence.known_tokens:
            sequence.prefixes.end(session.cache, session.tokens, session.stable_tokens)

    # ------------------------------------------------------------------ what is wanted of a sequence

    def prefill(self, sequence: Sequence, most: int) -> bool:
        """Run the next `most` tokens of its prompt if more are left beyond those that the cache holds.

        If `most` is the largest AR, the steps are those of running the whole prompt at once; if sessions have a window,
        it is run instead of `most`. Once no more than twice as many are left, the sequence decodes: its next step runs
        them.

        Returns:
            Whether it still is not.

        Raises:
            EdgeKVError: as `run`.
        """
        started, left = perf_counter_ns(), 0
        if self._pool.keeps(len(sequence.tokens)):
            if sequence.known_tokens == 0:
                _, sequence.known_tokens = self._enter(sequence, sequence.tokens)
            if window := self._pool.default.window:
                most = window - sequence.known_tokens % window
            most = self._graphs.step_tokens(sequence.tokens, sequence.known_tokens, most)
            left = len(sequence.tokens) - sequence.known_tokens
            if left > most:
                self.run(sequence, sequence.known_tokens + most)
        if left <= 2 * most:
            sequence.status = Status.DECODING
        sequence.prefill_ns += perf_counter_ns() - started
        return sequence.status is Status.PREFILLING

    def score(self, sequence: Sequence, left: list[int]) -> Scores:
        """The logits after the next tokens of its prompt, of those that are left.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
        """
        session = self._pool.default
        done = sequence.tokens[: len(sequence.tokens) - len(left)]
        if not _has_run(session, sequence, len(done)):  # sequences that are recomputed run in it too
            session.reset()
            session.adapt(sequence.adapter)
            session.writer = sequence
            if new := done[len(session.tokens) :]:
                session.feed(new, self._graphs.scoring_role, logits=False)
        rows: list[NDArray[Any]] = []
        if session.cache.sink is not None and session.is_empty:
            rows.append(session.cache.sink.logits)
        piece = left[: self._graphs.step_tokens(left, 0, self._graphs.most(self._graphs.scoring_role))]
        if piece:
            session.feed(piece, self._graphs.scoring_role, lambda logits: rows.append(logits.copy()))
        sequence.unscored = left[len(piece) :] or None
        return Scores(self._encoding.dequantize(np.concatenate(rows)))

    def branch(self, sequence: Sequence) -> NDArray[Any]:
        """The logits after each token of the sink, and then of its branches, as integers `[rows, V]`.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: as `run`.
        """
        self._keep_last()
        session = self._held_session(sequence)
        if session is None:
            session, sequence.known_tokens = self._enter(sequence, sequence.tokens)
        if new := sequence.unknown:
            self._feed(sequence, session, new, logits=False)
            sequence.known_tokens = len(sequence.tokens)
        rows, sink = session.branch(sequence.request.branches), session.cache.sink
        sequence.own_use.computed_tokens += len(new) + len(rows)
        return rows if sink is None else np.concatenate([sink.logits, rows])

    def search(self, sequence: Sequence) -> BeamResult | None:
        """Run the next position of a beam search; its result at the end.

        Raises:
            EdgeKVError: as `run`.
        """
        started, beams, cache = perf_counter_ns(), sequence.beams, self._pool.default.cache
        assert beams is not None, "it samples, searches or scores"
        if not beams.has_prompt:
            logits = self.run(sequence)
            beams.begin(logits, perf_counter_ns() - started)
        else:
            beams.step(cache, sequence.adapter)
        if not beams.search.done:
            return None
        prefix = None if sequence.prefixes is None else sequence.prefixes.stats
        return beams.result(cache, sequence.use, sequence.times, sequence.setup, prefix, self._texts.tokenizer)

    # ------------------------------------------------------------------ plain steps

    def run(self, sequence: Sequence, end: int | None = None) -> NDArray[Any]:
        """Run the tokens before `end` that no cache has.

        Args:
            sequence: whose tokens.
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
        if session is None or not self._holds(sequence, session):
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
            if self._recomputes and not self._pool.keeps(len(text)):  # the next step recomputes it
                session.count()
                sequence.session = None

    def _enter(self, sequence: Sequence, text: list[int]) -> tuple[Session, int]:
        """The session for the next step of a text, and how much of the text it has; it holds nothing else."""
        self._keep_last()
        assert sequence.cache is not None, "it has begun"
        session = self._pool.place(sequence.cache, len(text))
        session.adapt(sequence.adapter)
        start = restored = 0
        if not self._pool.keeps(len(text)):
            session.reset()
            start = len(session.tokens)
        else:
            prompt = sequence.prompt_tokens
            start, restored = self._recall(sequence, session, text[:prompt] if session.window else text)
        if sequence.known_tokens == 0:
            sequence.own_use.reused_tokens, sequence.own_use.restored_tokens = start, restored
        session.lend(sequence, sequence.own_use)
        return session, start

    def _feed(self, sequence: Sequence, session: Session, tokens: Tokens[int], *, logits: bool = True) -> NDArray[Any]:
        """Run tokens; full blocks are stored before layers with an attention window drop them."""
        if not tokens or sequence.prefixes is None:
            return session.feed(tokens, logits=logits)
        several, at = len(session.cache.groups) > 1, 0
        while at < len(tokens):
            most = session.cache.ar[-1] if several else len(tokens)
            if several and session.window:  # where its steps end, which may begin beside a picture
                most = session.window - len(session.tokens) % session.window
            end = at + self._graphs.step_tokens(tokens, at, most)
            last = session.feed(tokens[at:end], logits=logits and end == len(tokens))
            self._keep(sequence, session)
            at = end
        return last

    def _feed_again(self, sequence: Sequence, session: Session, text: Tokens[int]) -> NDArray[Any]:
        """Run what an evicted session had, in the steps that it had it from: the prompt, then token by token."""
        prompt = sequence.prompt_tokens
        if rest := text[len(session.tokens) : prompt]:
            logits = self._feed(sequence, session, rest)
        for token in text[prompt:]:
            logits = self._feed(sequence, session, [token])
        return logits

    def _keep_last(self) -> None:
        """Store the blocks that the last plain step has filled: after its logits were used, before anything else."""
        last, self._unkept = self._unkept, None
        if last is not None and last.session is not None and last.session.writer is last:
            self._keep(last, last.session)

    def _keep(self, sequence: Sequence, session: Session) -> None:
        """Store the blocks that have become full."""
        if sequence.prefixes is not None:
            sequence.prefixes.keep(session.cache, session.tokens, session.stable_tokens)

    def _holds(self, sequence: Sequence, session: Session) -> bool:
        """Whether the session holds exactly the known tokens, as this sequence left them."""
        return _has_run(session, sequence, sequence.known_tokens)

    def _recall(self, sequence: Sequence, session: Session, tokens: list[int]) -> tuple[int, int]:
        """How many of these tokens the session has, and how many of those were restored."""
        start = session.reuse(tokens, logits=not sequence.request.branches)
        if sequence.prefixes is None or start >= len(tokens) - 1:
            return start, 0
        try:
            end = sequence.prefixes.restore(session.cache, tokens, start, self._graphs.stable_cut)
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
        self._fill(sequence, right)
        return session.pass_logits if right == len(unknown) else None

    def _propose(self, sequence: Sequence, speculation: SpeculationRun) -> DraftTree:
        """What the next pass checks."""
        room = min(self._draft_room(sequence), sequence.max_tokens - len(sequence.tokens) - 1)
        drafts = speculation.propose(sequence.tokens, room, self._graphs.vocab, self._held_session(sequence))
        constraint = None if sequence.output is None else sequence.output.constraint
        if constraint is not None and len(drafts):
            return DraftTree.chain(constraint.continued(drafts.trunk().tokens, room))
        # Rows of branches are in other columns than in single steps.
        return drafts if self._graphs.batch_invariance == "equal" else drafts.trunk()

    def _draft_room(self, sequence: Sequence) -> int:
        """The most drafts that a pass takes behind the text; 0 if only a plain step can run what is not known.

        It is 0 where the sequence is recomputed in every step, where the context has no room for a verify graph, and
        where this graph would not give the bits of a plain step.
        """
        self._settle(sequence)
        if not self._runs_as_drafts(sequence) or not self._pool.keeps(sequence.known_tokens):
            return 0
        session = self._held_session(sequence)
        room = 0 if session is None else session.draft_room
        return max(0, room - len(sequence.tokens) + sequence.known_tokens)

    def _verify(self, sequence: Sequence, drafts: DraftTree) -> NDArray[Any]:
        """Run what is not known, and drafts behind it."""
        self._keep_last()
        session, tokens = self._held_session(sequence), sequence.unknown
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
            self._fill(sequence, len(tokens))

    def _runs_as_drafts(self, sequence: Sequence) -> bool:
        """Whether a verify graph gives the bits of the graph for these tokens: two or more are run as a prompt."""
        graphs = self._graphs
        is_alike = graphs.batch_invariance == "equal" and not graphs.has_whole_pictures
        return len(sequence.tokens) - sequence.known_tokens == 1 or is_alike

    def _settle(self, sequence: Sequence) -> None:
        """Close the pass that has drafts, if there is one; see `Session.settle`."""
        session, sequence.drafting = sequence.drafting, None
        if session is None:
            return
        session.settle()
        sequence.room_tokens = session.cache.room_tokens
        if session.cache.tokens_seen == len(session.tokens):
            self._keep(sequence, session)

    def _held_session(self, sequence: Sequence) -> Session | None:
        """The session that holds exactly what is known of a text, as its last step left it; None if there is none."""
        session = sequence.session
        return session if session is not None and self._holds(sequence, session) else None

    def _fill(self, sequence: Sequence, rows: int) -> None:
        """Count rows of an open pass, which fill the context as committed ones do."""
        if sequence.room_tokens is not None:
            sequence.room_tokens -= rows

    # ------------------------------------------------------------------ passes of several sequences

    def run_together(self, sequences: Iterable[Sequence], batch: Batch) -> None:
        """Run the next pass of several sequences as one, as far as they can; the next step of each then needs none.

        Those that need none, that speculate, or whose tokens find no room beside the others' run by themselves. A pass
        has one adapter, so those with the same share passes.

        Raises:
            EngineError: the runtime failed; the sequences of that pass have not changed.
        """
        ready: dict[BoundAdapter | None, list[tuple[Sequence, Session]]] = {}
        for sequence in sequences:
            if (session := self._shareable(sequence)) is not None:
                ready.setdefault(sequence.adapter, []).append((sequence, session))
        for alike in ready.values():
            for at in range(0, len(alike), batch.most):
                if len(some := alike[at : at + batch.most]) > 1:  # a step of its own reads less
                    self._run_pass(batch, some)

    def _run_pass(self, batch: Batch, some: list[tuple[Sequence, Session]]) -> None:
        started, times = perf_counter_ns(), self._graphs.times
        rows = batch.advance([session for _, session in some], [sequence.tokens[-1] for sequence, _ in some])
        spent, ns = self._graphs.times - times, perf_counter_ns() - started
        count = sum(row is not None for row in rows)
        for (sequence, session), row in zip(some, rows, strict=True):
            if row is not None:
                sequence.ready_logits = row
                sequence.known_tokens += 1
                sequence.times += StepTimes(1, spent.run_ns // count, spent.host_ns // count)
                sequence.own_use.computed_tokens += 1
                sequence.room_tokens = session.cache.room_tokens
                self._keep(sequence, session)
                sequence.decode_ns += ns

    def _shareable(self, sequence: Sequence) -> Session | None:
        """The session whose next step can be part of a pass of several sequences; None if it cannot."""
        if sequence.output is None or not sequence.output.tokens or not sequence.needs_pass:
            return None
        is_single = len(sequence.tokens) - sequence.known_tokens == 1 and sequence.speculation is None
        return self._held_session(sequence) if is_single and self._pool.keeps(len(sequence.tokens)) else None


def _roles(sequence: Sequence, graphs: Graphs) -> tuple[Role, ...]:
    """The graphs that it runs behind its prompt; of those for whole texts one was chosen."""
    if sequence.request.branches:
        return () if graphs.reads_whole_texts else ("verify",)
    return ("decode",) if sequence.speculation is None else ("decode", "verify")


def _has_run(session: Session, sequence: Sequence, tokens: int) -> bool:
    """Whether the session holds exactly this number of tokens, as this sequence left them."""
    return session.writer is sequence and not session.cache.dirty and session.cache.tokens_seen == tokens
