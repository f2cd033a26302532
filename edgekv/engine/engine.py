"""Requests in, events out: which requests run, in which caches, and what each step brings."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from time import perf_counter_ns

from edgekv.bundle import Bundle
from edgekv.engine.adapters import Adapters, BoundAdapter, LoraChoice
from edgekv.engine.batch import Batch, make_batch
from edgekv.engine.beams import BeamRun, check_beams
from edgekv.engine.caches import CacheSetup
from edgekv.engine.draft_model import DraftModel
from edgekv.engine.pictures import Pictures, check_pictured
from edgekv.engine.pool import SessionPool
from edgekv.engine.request import POOLED, Request
from edgekv.engine.sequence import Event, Resources, Scores, Sequence
from edgekv.engine.session import Graphs, Session
from edgekv.engine.speculation import DraftTarget
from edgekv.errors import UsageError
from edgekv.prefix import PrefixCache, PrefixStore, open_prefixes, open_store
from edgekv.runtime import Engine as Backend, StepTimes
from edgekv.spec import CHECKPOINT_TOKENS
from edgekv.text.output import AnswerReaders, Output
from edgekv.text.params import BeamParams
from edgekv.text.sampler import Sampler
from edgekv.text.texts import Texts

MOST_SEQUENCES = 4


class Engine:
    """Runs requests on a bundle. Single-threaded: the driver holds the lock, if there is one.

    `add` queues a request and `step` advances all, or `start` begins one and `Sequence.advance` brings its next event.
    A sequence holds its cache until it ends; a later request for the same cache that is started displaces it.

    Attributes:
        bundle: the bundle.
        name: of the runtime that computes: `cpu`, `htp`, ...
        texts: its tokenizer, templates and grammars.
        caches: options of its caches.
        graphs: its graphs.
        pictures: opens them.
        pool: the caches of sequences, and the engine's own.
        target: for drafts.
        draft_model: for models that it drafts for.
        most_sequences: pooled sequences that run at once, and caches that are kept for the next turns of their texts.
        waiting: added and not begun, in the order of their arrival.
        running: begun and not ended.
        used_batch: `batch`, once it was needed.
        verify_rows: tokens per inference of the graphs that check drafts, ascending.
        is_reproducible: whether a prompt has the same answer whatever is cached of it.
        shares_passes: whether a pass of `step` advances all sequences that have room in it.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        caches: CacheSetup,
        prefix_cache: PrefixCache | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Load no graph yet.

        Args:
            bundle: the bundle.
            backend: computes its graphs.
            caches: options of its caches.
            prefix_cache: see `edgekv.load`.
            lock: of its driver; see `SessionPool`.

        Raises:
            EdgeKVError: as `edgekv.load`.
        """
        self.bundle = bundle
        self.name: str = backend.name
        self.texts = Texts(bundle, caches.policy.name)
        self.caches = caches
        self.graphs = graphs = Graphs(bundle, backend, caches.make())
        self.pictures = Pictures(bundle, graphs.pictures)
        self.window = 0
        if caches.reproducible and graphs.batch_invariance != "equal":
            self.window = CHECKPOINT_TOKENS if graphs.sees_later_tokens else graphs.most("prefill")
        own = Session(graphs.cache, graphs, self.window)
        self.pool = SessionPool(lambda: Session(caches.make(), graphs, self.window), caches.mode, own, lock)
        self.draft_model = DraftModel(bundle, self.texts, self.pool)
        verify = sorted({graph.ar for graph in bundle.manifest.graphs if graph.role == "verify"})
        spec, invariance = bundle.manifest.model, graphs.batch_invariance
        only_chains = (
            "" if invariance == "equal" else f"the engine {self.name}, whose sums depend on the columns of tokens"
        )
        if spec.delta_rule is not None:
            only_chains = "layers with gated delta rules, whose tokens follow each other"
        takes_drafts = invariance != "unequal"
        self.target = DraftTarget(self.draft_model, self.name, verify, spec.vocab, takes_drafts, only_chains)
        self.verify_rows = verify
        self.is_reproducible = self.window > 0 or graphs.batch_invariance == "equal"
        self.most_sequences = MOST_SEQUENCES
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.used_batch: Batch | None = None
        self.shares_passes = False
        keeps_all = caches.mode.recomputed_tokens == 0
        if prefix_cache is not None and not keeps_all:
            found, fix = f"{caches.mode} with a prefix cache", "Choose the mode always, or leave the prefix cache out."
            raise UsageError("cache mode", got=found, expected="always or adaptive", fix=fix)
        least_block = self.window if graphs.sees_later_tokens else 0
        stored = bundle, self.name, graphs.cache, prefix_cache, self.window, least_block
        self._store = open_store(*stored) if keeps_all else None
        self._adapters = Adapters(bundle)
        logits = bundle.manifest.encodings["logits"]
        self._resources = Resources(self.pool, graphs, self.texts, logits, caches.described(backend), self.abort)
        self._alone_tokens = graphs.cache.ar[-1]
        self._beside_tokens = max(graph.ar for graph in bundle.manifest.graphs)

    def close(self) -> None:
        """End all sequences, store their prefixes, and free graphs and caches. It is not used afterwards.

        A prefix store that the caller opened stays open.
        """
        for sequence in (*self.running, *self.waiting):
            self.abort(sequence)
        if self._store is not None:
            self._store.close()
        self.used_batch = None
        # What a caller still holds, such as a generation for its statistics, keeps no memory.
        self.target.close()
        self.graphs.close()
        self.pool.close()
        del self.graphs, self.pool, self.draft_model, self.target, self._resources, self._store

    @property
    def prefix_store(self) -> PrefixStore | None:
        """Where computed prefixes are stored; None if there is no prefix cache."""
        return None if self._store is None else self._store.store

    @property
    def batch(self) -> Batch:
        """Runs passes of several sequences; it has a cache of its own.

        Raises:
            UsageError: the bundle or the runtime cannot.
            EngineError: the runtime refused the verify graph.
        """
        if self.used_batch is None:
            self.used_batch = make_batch(self.graphs, self.caches)
        return self.used_batch

    def open_lora(self, lora: str | None) -> BoundAdapter | None:
        """The adapters that a call names, ready to be bound; None for the base model.

        Raises:
            UsageError: the bundle has none of a name, or they do not fit into the slots together.
            BundleError: one is damaged.
        """
        return None if lora is None else self._adapters.open(LoraChoice.parse(lora))

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> Sequence:
        """Queue a request; `step` begins it once it has a cache.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        sequence = self._made(request)
        self.waiting.append(sequence)
        return sequence

    def start(self, request: Request) -> Sequence:
        """Begin a request now. A sequence that runs in its cache is displaced.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        sequence = self._made(request)
        self._displace(sequence.cache)
        self._begin(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a sequence; computed rows are stored in the prefix cache. Nothing happens if it has ended."""
        if sequence.has_ended:
            return
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        sequence.has_ended = True  # last: an interrupted call of this is made again
        try:
            if sequence.has_begun:
                sequence.finish()
        finally:
            if sequence.request.cache == POOLED and sequence.cache is not None:
                self.pool.give_back(sequence.cache)

    def holder(self, cache: int | None) -> Sequence | None:
        """The sequence that runs in a cache; None if it is free."""
        return next((each for each in self.running if each.uses(cache)), None)

    def _made(self, request: Request) -> Sequence:
        manifest, params = self.bundle.manifest, request.params
        adapter = self.open_lora(request.lora)
        key = None if adapter is None else adapter.key
        if params is None:
            return Sequence(request, self._resources, adapter)
        if request.pictures:
            check_pictured(request)
        prefixes = open_prefixes(self._store, request.salt, request.retention, key, len(request.tokens))
        if isinstance(params, BeamParams):
            check_beams(manifest, self.caches, request)
            sequence = Sequence(request, self._resources, adapter, prefixes)
            sequence.beams = BeamRun(request, params, self.graphs, manifest)
            return sequence
        constraint, calls = self.texts.bind(params.grammar, request.tools, request.salt)
        thoughts = None
        if request.reads_thoughts:
            thoughts = self.texts.thoughts(request.tokens, params.grammar, request.tools)
        encoding, eos = self._resources.encoding, manifest.tokens.eos
        sampler = Sampler.of(params, encoding, manifest.model.vocab, request.processors, eos)
        speculation = self.target.begin(request.speculation)
        output = Output(
            self._as_text(request),
            params,
            sampler,
            self.texts.tokenizer,
            eos,
            constraint,
            AnswerReaders(calls, thoughts, self.texts.special_texts if params.stop else {}),
            returns_logits=request.returns_logits,
        )
        return Sequence(request, self._resources, adapter, prefixes, output, speculation)

    def _as_text(self, request: Request) -> tuple[int, ...]:
        """The tokens of a prompt in the vocabulary: rows of pictures as the token that stands for them."""
        vision = self.bundle.manifest.vision
        if vision is None or not request.pictures:
            return request.tokens
        vocab, stands = self.bundle.manifest.model.vocab, vision.pictures.token_id
        return tuple(token if token < vocab else stands for token in request.tokens)

    def _displace(self, cache: int | None) -> None:
        if (holder := self.holder(cache)) is not None:
            holder.is_displaced = True
            self.abort(holder)

    def _begin(self, sequence: Sequence) -> None:
        """Give a sequence its cache, which nobody holds."""
        try:
            sequence.begin()
        except BaseException:
            self.abort(sequence)
            raise
        self.running.append(sequence)

    # ------------------------------------------------------------------ steps

    def step(self) -> list[tuple[Sequence, Event]]:
        """Begin what has a cache now, and advance every running sequence by a pass.

        Returns:
            What that brought, in order. A sequence whose event is an exception has ended; the others go on.
        """
        events: list[tuple[Sequence, Event]] = self._admit()
        running = [*self.running]
        if self.shares_passes:
            try:
                self.run_together([each for each in running if each.is_prefilled])
            except BaseException as error:  # panics of Rust libraries are no Exception
                events += [(each, self._failed(each, error)) for each in running if each.is_prefilled]
        # Beside other texts a prompt is read in pieces as short as the bundle's graphs.
        most = self._alone_tokens if len(self.running) == 1 else self._beside_tokens
        for sequence in running:
            events += self._turn(sequence, most)
        return events

    def _turn(self, sequence: Sequence, most: int) -> Iterable[tuple[Sequence, Event]]:
        """A pass of a sequence: a piece of its prompt, or the tokens that need no further pass."""
        events: list[tuple[Sequence, Event]] = []
        while not sequence.has_ended:
            try:
                event = sequence.advance(most)
            except BaseException as error:
                events.append((sequence, self._failed(sequence, error)))
                break
            if event is not None:
                events.append((sequence, event))
            if event is None or sequence.output is None or sequence.needs_pass or isinstance(event, Scores):
                break
        return events

    def _failed(self, sequence: Sequence, error: BaseException) -> BaseException:
        try:
            self.abort(sequence)
        except Exception:  # such as a full disk of the prefix cache: the first error is the one to tell
            traceback.print_exc()
        return error

    def run_together(self, sequences: Iterable[Sequence]) -> None:
        """Run the next pass of several sequences as one, as far as they can; `advance` of each then needs none.

        Those that need none, that speculate, or whose tokens find no room beside the others' run by themselves. A pass
        has one adapter, so those with the same share passes.

        Raises:
            UsageError: see `batch`.
            EngineError: the runtime failed; the sequences of that pass have not changed.
        """
        batch = self.batch
        ready: dict[BoundAdapter | None, list[tuple[Sequence, Session]]] = {}
        for each in sequences:
            if (session := each.shareable) is not None:
                ready.setdefault(each.adapter, []).append((each, session))
        for alike in ready.values():
            for at in range(0, len(alike), batch.most):
                if len(some := alike[at : at + batch.most]) > 1:  # a step of its own reads less
                    self._run_pass(batch, some)

    def _run_pass(self, batch: Batch, some: list[tuple[Sequence, Session]]) -> None:
        started, times = perf_counter_ns(), self.graphs.times
        rows = batch.advance([session for _, session in some], [sequence.tokens[-1] for sequence, _ in some])
        spent, ns = self.graphs.times - times, perf_counter_ns() - started
        count = sum(row is not None for row in rows)
        for (sequence, session), row in zip(some, rows, strict=True):
            if row is not None:
                sequence.take_part(session, row, StepTimes(1, spent.run_ns // count, spent.host_ns // count), ns)

    # ------------------------------------------------------------------ waiting

    def _admit(self) -> list[tuple[Sequence, Event]]:
        """Begin the sequences that have a cache, in the order of their arrival."""
        failed: list[tuple[Sequence, Event]] = []
        for sequence in [*self.waiting]:
            if self._waits(sequence):
                continue
            request = sequence.request
            if request.cache == POOLED and request.params is not None:
                sequence.cache = self.pool.best(request.tokens, request.salt, request.lora, self.most_sequences)
                if sequence.cache is None:
                    break
            self.waiting.remove(sequence)
            try:
                self._begin(sequence)
            except BaseException as error:
                failed.append((sequence, error))
        return failed

    def _waits(self, sequence: Sequence) -> bool:
        """Whether it waits for another one: for its cache, or for the rows of a prompt that both have."""
        request = sequence.request
        own = request.scores or request.cache != POOLED
        if own and self.holder(None if request.scores else sequence.cache) is not None:
            return True
        if self._store is None or not self._store.writes or request.params is None:
            return False
        reading = (each for each in self.running if each.output is not None and not each.output.tokens)
        return any(each.request.has_prompt_of(request) for each in reading)
