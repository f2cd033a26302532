"""A request: its tokens, the cache that it runs in, what it runs next, and what it has given so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Tokens
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.draft import DraftTree
from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.beams import BeamResult, BeamRun
from edgekv.engine.pool import SessionPool
from edgekv.engine.request import POOLED, Request
from edgekv.engine.session import CacheUse, Graphs, Session
from edgekv.engine.speculation import SpeculationRun
from edgekv.engine.stats import GenerationStats, GenerationTimes, Setup
from edgekv.prefix import Prefixes
from edgekv.runtime import StepTimes
from edgekv.text.output import Output, StopReason, Token
from edgekv.text.params import SamplingParams
from edgekv.text.texts import Texts
from quant import Encoding


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The logits after the next tokens of a prompt, first those of the sink.

    Attributes:
        rows: `[rows, V]` in float32.
    """

    rows: NDArray[np.float32]


Event = Token | Scores | BeamResult | BaseException
"""What a step brings a sequence; an exception ends it."""


@dataclass(slots=True, eq=False)
class Resources:
    """What the sequences of an engine share.

    Attributes:
        pool: their sessions.
        graphs: of the sessions.
        texts: turns tokens into text.
        encoding: of the logits.
        setup: for their statistics.
        end: ends a sequence; see `Engine.abort`.
        unkept: the sequence whose last step may have filled blocks that are not in the prefix cache; None if none has.
    """

    pool: SessionPool
    graphs: Graphs
    texts: Texts
    encoding: Encoding
    setup: Setup
    end: Callable[[Sequence], None]
    unkept: Sequence | None = None


class Sequence:
    """A request from its arrival to its end. Its engine, or the engine's driver, decides when it runs.

    Tokens are known once they are in a cache: run, reused or restored. A cache that was evicted in the meantime is
    recomputed from all tokens.

    Attributes:
        request: what is asked.
        cache: id of the cache that it runs in; None for the engine's own. Of a pooled one, once it has begun.
        adapter: what to compute with; None for the base model.
        prefixes: the prefix cache; None for none.
        tokens: prompt and output.
        known_tokens: how many of them are in a cache.
        output: what is generated; None if nothing is sampled.
        speculation: drafts tokens, so that a pass may bring several; None for one token a pass.
        beams: the beam search; None without one.
        unscored: tokens of the prompt that are still to be scored; None if none are wanted, or once all are.
        has_begun: whether it has a cache.
        is_prefilled: whether the next step runs all that is left of its prompt.
        has_ended: whether it has ended in any way.
        is_displaced: whether a later request took its cache over.
        session: what it runs in; None before it has one, and once that is freed.
        times: of its steps.
        room_tokens: how many more tokens can be run; None if there is no limit, or before the first step.
        ready_logits: after the text, from a pass of several sequences; None if there are none.
        drafting: the session whose last pass has drafts; None if there is none.
    """

    def __init__(
        self,
        request: Request,
        resources: Resources,
        adapter: BoundAdapter | None = None,
        prefixes: Prefixes | None = None,
        output: Output | None = None,
        speculation: SpeculationRun | None = None,
    ) -> None:
        self.request = request
        self.cache: int | None = None if request.cache == POOLED else request.cache
        self.adapter = adapter
        self.prefixes = prefixes
        self.tokens = list(request.tokens)
        self.known_tokens = 0
        self.output = output
        self.speculation = speculation
        self.has_begun = self.is_prefilled = self.has_ended = self.is_displaced = False
        self.session: Session | None = None
        self.own_use = CacheUse()
        self.times = StepTimes()
        self.room_tokens: int | None = None
        self.ready_logits: NDArray[Any] | None = None
        self.drafting: Session | None = None
        self.beams: BeamRun | None = None
        self.unscored: list[int] | None = None
        self._resources = resources
        self._pool = resources.pool
        self._graphs = resources.graphs
        self._recomputes = resources.pool.mode.recomputed_tokens != 0  # any
        self._prefill_steps = self._prefill_ns = self._first_ns = self._decode_ns = 0

    @property
    def use(self) -> CacheUse:
        """What it did with caches so far."""
        if self.session is not None and self.session.writer is self:
            self.session.count()
        return self.own_use

    @property
    def unknown(self) -> list[int]:
        """The tokens that the next step has to run."""
        return self.tokens[self.known_tokens :]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and output at most."""
        return self.prompt_tokens + (0 if self.request.params is None else self.request.params.max_new_tokens)

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for a token behind the text."""
        return self.room_tokens is not None and self.room_tokens < len(self.tokens) - self.known_tokens

    @property
    def stop_reason(self) -> StopReason | None:
        """Why its output ended; None while it runs or if it was interrupted."""
        return None if self.output is None else self.output.stop_reason

    @property
    def needs_pass(self) -> bool:
        """Whether the next token needs an inference: it is not forced, and no pass has run the one before it."""
        if self.output is None or not self.output.needs_logits or self.ready_logits is not None:
            return False
        return self.drafting is None or not self.drafting.has_run(self.unknown)

    def uses(self, cache: int | None) -> bool:
        """Whether it runs in the cache of this id; None is the engine's own, which all scores are computed in."""
        return self.cache == cache or (cache is None and self.unscored is not None)

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far, of a request that samples."""
        output, params, times = self.output, self.request.params, self.times
        assert output is not None and isinstance(params, SamplingParams), "it samples"
        decoded = len(output.tokens) - 1
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=len(output.tokens),
            forced_tokens=output.forced_tokens,
            stop_reason=output.stop_reason,
            times=GenerationTimes(
                prefill_ms=self._prefill_ns / 1e6,
                first_token_ms=self._first_ns / 1e6 if output.tokens else None,
                decode_ms_per_token=self._decode_ns / 1e6 / decoded if decoded > 0 else None,
                steps=times.steps,
                decode_steps=times.steps - self._prefill_steps,
                host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            ),
            cache=replace(self.use),
            setup=self._resources.setup,
            sampling=params,
            bundle_defaults=self.request.bundle_defaults,
            seed=output.sampler.seed,
            prefix=None if self.prefixes is None else self.prefixes.stats,
            speculation=None if self.speculation is None else self.speculation.stats,
        )

    def begin(self) -> None:
        """Allocate its cache and load its graphs, so that errors occur before any work; the engine's own is emptied.

        Raises:
            UsageError: the id of its cache is not a 64-bit integer.
            MemoryBudgetError: the cache does not fit.
            EngineError: the engine refused a graph.
        """
        self._keep_last()
        own = self._pool.own
        if self.request.params is not None:
            self._pool.claim(self.cache, self.prompt_tokens)
            self._graphs.prepare("decode", *(() if self.speculation is None else ("verify",)))
            self._graphs.prepare_prompt("prefill", self.prompt_tokens)
        if self.request.scores:
            sink = own.cache.sink
            self._graphs.prepare_prompt("score", self.prompt_tokens - (0 if sink is None else len(sink.tokens)))
        held = own.cache.stats
        self.own_use.bytes_held, self.own_use.bytes_peak = held.bytes_held, held.peak_bytes
        self.has_begun = True
        if self.cache is None or self.request.scores:
            own.reset()
            own.adapt(self.adapter)
            self._graphs.use(own.cache, self.adapter)
        if self.request.scores:
            self.unscored = self.tokens[len(own.tokens) :]

    def finish(self) -> None:
        """End it, complete or interrupted: the end of its text is stored in the prefix cache."""
        if self.speculation is not None:
            self.speculation.finish()
        self._keep_last()
        self._settle()
        session, self.session = self.session, None
        if session is None or session.writer is not self:
            return
        session.count()
        session.is_busy = False
        if self.prefixes is not None and self.known_tokens:
            self.prefixes.end(session.cache, session.tokens, session.stable_tokens)

    # ------------------------------------------------------------------ events

    def advance(self, most: int | None = None) -> Event | None:
        """The next event, once it has begun; it ends with its last one, and if this fails.

        Args:
            most: tokens of its prompt that are run at once; None for all.

        Returns:
            None after a piece of the prompt.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        started = perf_counter_ns()
        try:
            if self.unscored is not None:
                return self._scored(self.unscored)
            if most is not None and not self.is_prefilled and self.prefill(most):
                return None
            if self.output is None:
                return self._searched(started)
            output, logits, logits_ns = self.output, None, 0
            if output.needs_logits:
                if (logits := self.ready_logits) is not None:
                    self.ready_logits = None
                elif self.speculation is None or not output.tokens:
                    logits = self.run()
                else:
                    logits = self._run_with_drafts(self.speculation)
                logits_ns = perf_counter_ns() - started
            choosing = perf_counter_ns()
            token_id = output.choose(logits)
            if self.speculation is not None and len(output.tokens) > 1:
                self.speculation.chose(perf_counter_ns() - choosing)
            self.tokens.append(token_id)
            token = output.say(token_id, logits, is_full=self.is_full)
            self._count(logits_ns, perf_counter_ns() - started)
        except BaseException:
            self._resources.end(self)
            raise
        if output.stop_reason is not None:
            self._resources.end(self)
        return token

    def prefill(self, most: int) -> bool:
        """Run the next `most` tokens of its prompt if more are left beyond those that the cache holds.

        `advance` runs the rest. If `most` is the largest AR, the steps are those of running the whole prompt at once;
        if sessions have a window, it is run instead of `most`. Once no more than `most` are left, it is prefilled.

        Returns:
            Whether more than `most` tokens are left.

        Raises:
            EdgeKVError: as `advance`.
        """
        started, left = perf_counter_ns(), 0
        try:
            if self._pool.keeps(len(self.tokens)):
                if self.known_tokens == 0:
                    _, self.known_tokens = self._enter(self.tokens)
                if window := self._pool.own.window:
                    most = window - self.known_tokens % window
                left = len(self.tokens) - self.known_tokens
                if left > most:
                    self.run(self.known_tokens + most)
        except BaseException:
            self._resources.end(self)
            raise
        self.is_prefilled = left <= 2 * most
        self._prefill_ns += perf_counter_ns() - started
        return not self.is_prefilled

    def _scored(self, left: list[int]) -> Scores:
        """The logits after the next tokens of its prompt; it ends with the last ones if nothing else is wanted."""
        session = self._pool.own
        done = self.tokens[: len(self.tokens) - len(left)]
        if not self._has_run(session, len(done)):  # sequences that are recomputed run in it too
            session.reset()
            session.adapt(self.adapter)
            session.writer = self
            if new := done[len(session.tokens) :]:
                session.feed(new, "score", logits=False)
        rows: list[NDArray[Any]] = []
        if session.cache.sink is not None and session.is_empty:
            rows.append(session.cache.sink.logits)
        piece = left[: self._graphs.most("score")]
        if piece:
            session.feed(piece, "score", lambda logits: rows.append(logits.copy()))
        self.unscored = left[len(piece) :] or None
        scores = Scores(self._resources.encoding.dequantize(np.concatenate(rows)))
        if self.unscored is None and self.output is None:
            self._resources.end(self)
        return scores

    def _searched(self, started: int) -> BeamResult | None:
        """Run the next position of a beam search; its result at the end."""
        beams, cache, resources = self.beams, self._pool.own.cache, self._resources
        assert beams is not None, "it samples, searches or scores"
        if not beams.has_prompt:
            logits = self.run()
            beams.begin(logits, perf_counter_ns() - started)
        else:
            self._graphs.use(cache, self.adapter)
            beams.step(cache)
        if not beams.search.done:
            return None
        prefix = None if self.prefixes is None else self.prefixes.stats
        resources.end(self)
        return beams.result(cache, self.use, self.times, resources.setup, prefix, resources.texts.tokenizer)

    def _count(self, logits_ns: int, token_ns: int) -> None:
        """Count the time of a token, and of its logits within it."""
        if self._first_ns == 0:
            self._first_ns = self._prefill_ns + token_ns
            self._prefill_ns += logits_ns
            self._prefill_steps = self.times.steps
        else:
            self._decode_ns += token_ns

    # ------------------------------------------------------------------ plain steps

    def run(self, end: int | None = None) -> NDArray[Any]:
        """Run the tokens before `end` that no cache has.

        Args:
            end: of the text; None for all tokens.

        Returns:
            The logits of the last of all tokens as integers `[V]`, valid until the next step; before it, any.

        Raises:
            ContextFullError: the context has no room.
            EngineError: the runtime failed.
            MemoryBudgetError: the sequence has grown beyond the threshold, and a cache for it does not fit.
        """
        self._keep_last()
        if self.drafting is not None:
            self._settle()
        known, session = self.known_tokens, self.session
        text = self.tokens if end is None else self.tokens[:end]
        if session is None or not self._holds(session):
            session, start = self._enter(text)
        else:
            start = known
        self.known_tokens = len(text)
        clock = self._graphs.clock
        steps, run_ns, host_ns = clock.steps, clock.run_ns, clock.host_ns
        try:
            if session.window and start < known:
                return self._feed_again(session, text)
            new = text[start:]
            if self.prefixes is None or (self.output is not None and len(session.cache.groups) == 1):
                self._resources.unkept = None if self.prefixes is None else self
                return session.feed(new, logits=end is None)
            return self._feed(session, new, logits=end is None)
        finally:
            self.own_use.computed_tokens += len(text) - start
            self.room_tokens = session.cache.room_tokens
            times = self.times
            times.steps += clock.steps - steps
            times.run_ns += clock.run_ns - run_ns
            times.host_ns += clock.host_ns - host_ns
            if self._recomputes and not self._pool.keeps(len(text)):  # the next step recomputes it
                session.count()
                self.session = None

    def _enter(self, text: list[int]) -> tuple[Session, int]:
        """The session for the next step of a text, and how much of the text it has; it holds nothing else."""
        self._keep_last()
        session = self._pool.place(self.cache, len(text))
        session.adapt(self.adapter)
        start = restored = 0
        if not self._pool.keeps(len(text)):
            session.reset()
            start = len(session.tokens)
        else:
            prompt = self.prompt_tokens
            start, restored = self._recall(session, text[:prompt] if session.window else text)
        if self.known_tokens == 0:
            self.own_use.reused_tokens, self.own_use.restored_tokens = start, restored
        session.lend(self, self.own_use)
        return session, start

    def _feed(self, session: Session, tokens: Tokens[int], *, logits: bool = True) -> NDArray[Any]:
        """Run tokens; full blocks are stored before layers with an attention window drop them."""
        if not tokens or self.prefixes is None:
            return session.feed(tokens, logits=logits)
        piece = session.cache.ar[-1] if len(session.cache.groups) > 1 else len(tokens)
        for at in range(0, len(tokens), piece):
            found = session.feed(tokens[at : at + piece], logits=logits and at + piece >= len(tokens))
            self._keep(session)
        return found

    def _feed_again(self, session: Session, text: Tokens[int]) -> NDArray[Any]:
        """Run what an evicted session had, in the steps that it had it from: the prompt, then token by token."""
        prompt = self.prompt_tokens
        if rest := text[len(session.tokens) : prompt]:
            logits = self._feed(session, rest)
        for token in text[prompt:]:
            logits = self._feed(session, [token])
        return logits

    def _keep_last(self) -> None:
        """Store the blocks that the last plain step has filled: after its logits were used, before anything else."""
        last, self._resources.unkept = self._resources.unkept, None
        if last is not None and last.session is not None and last.session.writer is last:
            last._keep(last.session)

    def _keep(self, session: Session) -> None:
        """Store the blocks that have become full."""
        if self.prefixes is not None:
            self.prefixes.keep(session.cache, session.tokens, session.stable_tokens)

    def _holds(self, session: Session) -> bool:
        """Whether the session holds exactly the known tokens, as this sequence left them."""
        return self._has_run(session, self.known_tokens)

    def _has_run(self, session: Session, tokens: int) -> bool:
        """Whether the session holds exactly this number of tokens, as this sequence left them."""
        return session.writer is self and not session.cache.dirty and session.cache.tokens_seen == tokens

    def _recall(self, session: Session, tokens: list[int]) -> tuple[int, int]:
        """How many of these tokens the session has, and how many of those were restored."""
        start = session.reuse(tokens)
        if self.prefixes is None or start >= len(tokens) - 1:
            return start, 0
        try:
            end = self.prefixes.restore(session.cache, tokens, start)
        except BaseException:
            session.reset()
            raise
        if end > start:
            session.adopt(tokens[:end], end)
        return end, end - start

    # ------------------------------------------------------------------ passes with drafts

    def _run_with_drafts(self, speculation: SpeculationRun) -> NDArray[Any]:
        """As `run`, with drafts behind the text: the next calls may find that their tokens have run.

        Raises:
            EdgeKVError: as `run`.
        """
        known = self.known_tokens
        logits = self._take_drafts()
        speculation.accept(self.tokens[known : self.known_tokens])
        if logits is not None:
            return logits
        drafts = self._propose(speculation)
        started = perf_counter_ns()
        logits = self._verify(drafts) if len(drafts) else self.run()
        speculation.ran(self._graphs.last_ar, drafts, perf_counter_ns() - started)
        return logits

    def _take_drafts(self) -> NDArray[Any] | None:
        """The logits after the text, if the last pass has run the rest of it as drafts; otherwise None.

        The tokens that it has run are known from then on, in both cases.
        """
        session, unknown = self.drafting, self.unknown
        if session is None or not self._runs_as_drafts() or not (right := session.take(unknown)):
            return None
        self.known_tokens += right
        self._fill(right)
        return session.pass_logits if right == len(unknown) else None

    def _propose(self, speculation: SpeculationRun) -> DraftTree:
        """What the next pass checks."""
        room = min(self._draft_room(), self.most_tokens - len(self.tokens) - 1)
        drafts = speculation.propose(self.tokens, room, self._graphs.vocab, self._held_session())
        constraint = None if self.output is None else self.output.constraint
        if constraint is not None and len(drafts):
            return DraftTree.chain(constraint.continued(drafts.trunk().tokens, room))
        # Rows of branches are in other columns than in single steps.
        return drafts if self._graphs.batch_invariance == "equal" else drafts.trunk()

    def _draft_room(self) -> int:
        """The most drafts that a pass takes behind the text; 0 if only a plain step can run what is not known.

        It is 0 where the sequence is recomputed in every step, where the context has no room for a verify graph, and
        where this graph would not give the bits of a plain step.
        """
        self._settle()
        if not self._runs_as_drafts() or not self._pool.keeps(self.known_tokens):
            return 0
        session = self._held_session()
        room = 0 if session is None else session.draft_room
        return max(0, room - len(self.tokens) + self.known_tokens)

    def _verify(self, drafts: DraftTree) -> NDArray[Any]:
        """Run what is not known, and drafts behind it."""
        self._keep_last()
        session, tokens = self._held_session(), self.unknown
        assert session is not None, "there is room for drafts"
        times = self._graphs.times
        try:
            logits = session.verify(tokens, drafts)
            self.known_tokens = len(self.tokens)
            self.drafting = session
            return logits
        finally:
            self.times += self._graphs.times - times
            self.own_use.computed_tokens += len(tokens) + len(drafts)
            self.room_tokens = session.cache.room_tokens
            self._fill(len(tokens))

    def _runs_as_drafts(self) -> bool:
        """Whether a verify graph gives the bits of the graph for these tokens: two or more are run as a prompt."""
        return len(self.tokens) - self.known_tokens == 1 or self._graphs.batch_invariance == "equal"

    def _settle(self) -> None:
        """Close the pass that has drafts, if there is one; see `Session.settle`."""
        session, self.drafting = self.drafting, None
        if session is None:
            return
        session.settle()
        self.room_tokens = session.cache.room_tokens
        if session.cache.tokens_seen == len(session.tokens):
            self._keep(session)

    def _held_session(self) -> Session | None:
        """The session that holds exactly what is known of a text, as its last step left it; None if there is none."""
        session = self.session
        return session if session is not None and self._holds(session) else None

    def _fill(self, rows: int) -> None:
        """Count rows of an open pass, which fill the context as committed ones do."""
        if self.room_tokens is not None:
            self.room_tokens -= rows

    # ------------------------------------------------------------------ passes of several sequences

    @property
    def shareable(self) -> Session | None:
        """The session whose next step can be part of a pass of several sequences; None if it cannot."""
        is_ready = not self.has_ended and self.output is not None and len(self.output.tokens) > 0 and self.needs_pass
        is_single = len(self.tokens) - self.known_tokens == 1 and self.speculation is None
        return self._held_session() if is_ready and is_single and self._pool.keeps(len(self.tokens)) else None

    def take_part(self, session: Session, logits: NDArray[Any], share: StepTimes, ns: int) -> None:
        """Note that a pass of several sequences has run the next token.

        Args:
            session: that it runs in.
            logits: after the token, `[V]`.
            share: of the pass.
            ns: time of the pass.
        """
        self.ready_logits = logits
        self.known_tokens += 1
        self.times += share
        self.own_use.computed_tokens += 1
        self.room_tokens = session.cache.room_tokens
        self._keep(session)
        self._decode_ns += ns
