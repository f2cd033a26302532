"""The engine: requests in, events out. The library's iterators and the server's thread drive it in the same way."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from html import escape
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import finalize, ref

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine.adapters import Adapters, BoundAdapter, LoraChoice
from edgekv.engine.batch import Batch, make_batch
from edgekv.engine.beams import BeamResult, BeamRun, check_beams
from edgekv.engine.caches import CacheSetup
from edgekv.engine.drafting import Drafting
from edgekv.engine.pictures import Pictures, check_pictured
from edgekv.engine.pool import SessionPool
from edgekv.engine.request import DEFAULT_CACHE, Request, check_ends, check_writes
from edgekv.engine.runner import Runner
from edgekv.engine.scheduler import Scheduler
from edgekv.engine.sequence import Event, Scores, Sequence, Status
from edgekv.engine.session import Graphs, Session
from edgekv.engine.stats import EngineGauges, GenerationStats
from edgekv.errors import UsageError
from edgekv.prefix import PrefixCache, PrefixStore, open_prefixes, open_store
from edgekv.runtime import Engine as Backend
from edgekv.spec import CHECKPOINT_TOKENS
from edgekv.text.output import AnswerReaders, Output, StopReason, Token
from edgekv.text.params import BeamParams
from edgekv.text.sampler import Sampler
from edgekv.text.texts import Texts
from edgekv.text.tools import ToolCall

if TYPE_CHECKING:
    from typing import Self

    from edgekv.pictures import Picture

_MAX_SEQUENCES = 4
_SHOWN_CHARACTERS = 60
_POLL_S = 0.5
"""A thread that died without closing its generation notifies nobody."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_E = TypeVar("_E", bound=Token | Scores | BeamResult)


class Engine:
    """Runs requests on a bundle: `add` queues one, `step` advances all or one of them, `abort` ends one.

    One step at a time: threads that share an engine call these three with `lock` held; nothing else locks. The garbage
    collector may end a call in the middle of a step of the same thread, so such an end is deferred to the end of the
    step. Ctrl-C may come between any two lines: the lock is only ever taken by a `with` on the lock itself, which no
    signal divides, and what was deferred is removed once it is done.

    A sequence holds its cache until it ends.

    Attributes:
        bundle: the bundle.
        name: of the runtime that computes: `cpu`, `htp`, ...
        texts: its tokenizer, templates and grammars.
        caches: options of its caches.
        graphs: its graphs.
        pictures: opens them.
        pool: the caches of sequences.
        drafting: drafts for other models, and those of others for it.
        waiting: added and not begun, in the order of their arrival.
        running: begun and not ended.
        verify_rows: tokens per inference of the graphs that check drafts, ascending.
        branch_rows: the most tokens of a request's branches together; 0 if it can have none.
        is_reproducible: whether a prompt has the same answer whatever is cached of it.
        shares_passes: whether a pass of `step` advances all sequences that have room in it.
        is_closed: whether it was closed.
        lock: of a step; not reentrant.
    """

    def __init__(
        self, bundle: Bundle, backend: Backend, caches: CacheSetup, prefix_cache: PrefixCache | None = None
    ) -> None:
        """Load no graph yet.

        Args:
            bundle: the bundle.
            backend: computes its graphs.
            caches: options of its caches.
            prefix_cache: see `edgekv.load`.

        Raises:
            EdgeKVError: as `edgekv.load`.
        """
        self.is_closed = False
        self.lock = threading.Lock()
        self._deferred: deque[Callable[[], object]] = deque()
        self._freed: list[SimpleQueue[None]] = []  # one for each thread that waits for a cache
        self.bundle = bundle
        self.name: str = backend.name
        self.texts = Texts(bundle, caches.policy.name)
        self.caches = caches
        self.graphs = graphs = Graphs(bundle, backend, caches.make())
        self.pictures = Pictures(bundle, graphs.pictures, self.texts.read)
        self.window, is_alone = 0, caches.reproducible and graphs.batch_invariance != "equal"
        if is_alone and not graphs.reads_whole_texts:
            self.window = CHECKPOINT_TOKENS if graphs.sees_later_tokens else graphs.most("prefill")
        default = Session(graphs.cache, graphs, self.window)
        self.pool = SessionPool(lambda: Session(caches.make(), graphs, self.window), caches.mode, default, self.lock)
        self.drafting = Drafting(bundle, self.texts, self.pool, self.name, graphs.batch_invariance)
        self.verify_rows = self.drafting.rows
        self.is_reproducible = self.window > 0 or graphs.batch_invariance == "equal"
        self._batch: Batch | None = None
        self.shares_passes = False
        keeps_all = caches.mode.keeps_all
        if prefix_cache is not None and not keeps_all:
            got, fix = f"{caches.mode} with a prefix cache", "Choose the mode always, or leave the prefix cache out."
            raise UsageError("cache mode", got=got, expected="always or adaptive", fix=fix)
        min_block_tokens = self.window if graphs.sees_later_tokens else 0
        stored = bundle, caches.manifest, self.name, graphs.cache, prefix_cache, self.window, min_block_tokens
        self._store = store = open_store(*stored) if keeps_all else None
        self._adapters = Adapters(bundle)
        self._setup = caches.described(backend)
        self.branch_rows = 0 if is_alone else graphs.branch_rows
        self._encoding = bundle.manifest.encodings["logits"]
        self._runner = Runner(self.pool, graphs, self.texts, self._encoding)
        pieces = graphs.cache.ar[-1], max(graph.ar for graph in bundle.manifest.graphs)
        self._scheduler = Scheduler(self.pool, pieces, shares_prompts=store is not None and store.writes)
        self.waiting, self.running = self._scheduler.waiting, self._scheduler.running

    def close(self) -> None:
        """End all sequences, store their prefixes, and free graphs and caches; later requests are refused.

        A prefix store that the caller opened stays open.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for sequence in (*self.running, *self.waiting):
            self.abort(sequence)
        if self._store is not None:
            self._store.close()
        self._batch = None
        # What a caller still holds, such as a generation for its statistics, keeps no memory.
        self.drafting.close()
        self.graphs.close()
        self.pool.close()
        del self.graphs, self.pool, self.drafting, self._runner, self._scheduler, self._store
        self._wake()

    def check_open(self) -> None:
        """Raise UsageError if it was closed."""
        if self.is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")

    @property
    def max_sequences(self) -> int:
        """Sequences that run at once in caches that the pool chooses; as many are kept for the next turns of texts."""
        return self._scheduler.max_sequences

    @max_sequences.setter
    def max_sequences(self, count: int) -> None:
        self._scheduler.max_sequences = count

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
        if self._batch is None:
            self._batch = make_batch(self.graphs, self.caches)
        return self._batch

    def gauges(self) -> EngineGauges:
        """What it holds now."""
        pool, store = self.pool.stats, self.prefix_store
        gauges = EngineGauges(
            queued=len(self.waiting),
            running=len(self.running),
            sessions=pool.total_sequences,
            session_bytes=pool.total_bytes,
            evictions=pool.evictions,
            busy=self.pool.taken,
        )
        if store is not None:
            stats = store.stats
            gauges.prefix_blocks, gauges.prefix_bytes = stats.memory.blocks, stats.memory.bytes_held
            gauges.prefix_hits, gauges.prefix_misses = stats.hits, stats.misses
            gauges.rejected_files = stats.rejected_files
        if self._batch is not None:
            gauges.batch_passes, gauges.batch_tokens = self._batch.passes, self._batch.rows
        return gauges

    def open_lora(self, lora: str | None) -> BoundAdapter | None:
        """The adapters that a call names, ready to be bound; None for the base model.

        Raises:
            UsageError: the bundle has none of a name, or they do not fit into the slots together.
            BundleError: one is damaged.
        """
        return None if lora is None else self._adapters.open(LoraChoice.parse(lora))

    # ------------------------------------------------------------------ the way of a request

    def add(self, request: Request) -> Sequence:
        """Queue a request; `step` begins it once it has a cache.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        self.check_open()
        sequence = self._made(request)
        self.waiting.append(sequence)
        return sequence

    def step(self, only: Sequence | None = None) -> list[tuple[Sequence, Event]]:
        """Begin what has a cache now, and advance every running sequence by a pass; or bring the next event of one.

        A pass runs a piece of a prompt, or brings all tokens that need no further one. The next event of one sequence
        alone, `only`, is a token or scores, after all of its prompt has run.

        Returns:
            What that brought, in order. A sequence whose event is an exception has ended; the others go on. Nothing
            for one sequence that has ended or has no cache, or within a beam search.

        Raises:
            EdgeKVError: of one sequence, which has ended; see `Model.generate`.
            ValueError: one sequence was displaced.
        """
        if only is None:
            return self._step_all()
        if only.status >= Status.ENDED:
            self._check_kept(only)
            return []
        try:
            if only.status == Status.WAITING and not self._begin(only):
                return []
            event, has_ended = self._next_event(only)
        except BaseException:
            self.abort(only)
            raise
        if has_ended:
            self.abort(only)
        return [] if event is None else [(only, event)]

    def _next_event(self, sequence: Sequence) -> tuple[Event | None, bool]:
        """The next event of a sequence that has begun, and whether it was the last; none within a beam search."""
        if sequence.unscored is not None:
            scores = self._runner.score(sequence, sequence.unscored)
            return scores, sequence.unscored is None and sequence.request.params is None
        if sequence.request.ends:
            return Scores(self._encoding.dequantize(self._runner.run(sequence)[None])), True
        if sequence.request.branches:
            return Scores(self._encoding.dequantize(self._runner.branch(sequence))), True
        if sequence.output is None:
            result = self._runner.search(sequence)
            return result, result is not None
        started, output, logits, logits_ns = perf_counter_ns(), sequence.output, None, 0
        if output.needs_logits:
            if (logits := sequence.ready_logits) is not None:
                sequence.ready_logits = None
            elif sequence.speculation is None or not output.tokens:
                logits = self._runner.run(sequence)
            else:
                logits = self._runner.run_with_drafts(sequence, sequence.speculation)
            logits_ns = perf_counter_ns() - started
        choosing = perf_counter_ns()
        token = output.choose(logits)
        if sequence.speculation is not None and len(output.tokens) > 1:
            sequence.speculation.chose(perf_counter_ns() - choosing)
        sequence.tokens.append(token)
        room = sequence.room_tokens
        is_full = room is not None and room < len(sequence.tokens) - sequence.known_tokens
        said = output.say(token, logits, is_full=is_full)
        token_ns = perf_counter_ns() - started
        if sequence.first_ns:
            sequence.decode_ns += token_ns
        else:
            sequence.status = Status.DECODING
            sequence.first_ns = sequence.prefill_ns + token_ns
            sequence.prefill_ns += logits_ns
            sequence.prefill_steps = sequence.times.steps
        return said, output.stop_reason is not None

    def abort(self, sequence: Sequence, status: Status = Status.ENDED) -> None:
        """End a sequence; computed rows are stored in the prefix cache. Nothing happens if it has ended."""
        if sequence.status >= Status.ENDED:
            return
        try:
            if sequence.status != Status.WAITING:
                self._runner.finish(sequence)
        finally:
            self.pool.release(sequence, sequence.cache)
            self.pool.release(sequence, DEFAULT_CACHE)
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            if sequence in self.running:
                self.running.remove(sequence)
            sequence.status = status  # last: an interrupted call of this is made again
            self._wake()

    def holder(self, cache: int) -> Sequence | None:
        """The sequence that runs in a cache; None if it is free."""
        return self.pool.holder(cache)

    def _made(self, request: Request) -> Sequence:
        manifest, params, setup = self.bundle.manifest, request.params, self._setup
        adapter = self.open_lora(request.lora)
        key = None if adapter is None else adapter.key
        self._check_task(request)
        if not request.is_pooled:
            return Sequence(request, setup, adapter)
        if request.pictures:
            check_pictured(request, manifest, self.caches.policy)
        prefixes = open_prefixes(self._store, request.salt, request.retention, key, len(request.tokens))
        if params is None:
            return Sequence(request, setup, adapter, prefixes)
        if isinstance(params, BeamParams):
            check_beams(manifest, self.caches, request)
            return Sequence(request, setup, adapter, prefixes, beams=BeamRun(request, params, self.graphs, manifest))
        constraint, calls = self.texts.bind(params.grammar, request.tools, request.salt)
        thoughts = None
        if request.reads_thoughts:
            thoughts = self.texts.thoughts(request.tokens, params.grammar, request.tools)
        encoding, eos = self._encoding, manifest.tokens.eos
        sampler = Sampler.of(params, encoding, manifest.model.vocab, request.processors, eos)
        speculation = None if request.speculation is None else self.drafting.begin(request.speculation)
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
        return Sequence(request, setup, adapter, prefixes, output, speculation)

    def _check_task(self, request: Request) -> None:
        """Refuse texts of a model that gives embeddings, and the ends of texts of one that writes.

        Raises:
            UsageError: the bundle is of the other kind.
        """
        if request.only_reads:
            check_ends(self.bundle)
        elif request.params is not None:
            check_writes(self.bundle)
        if self.graphs.reads_whole_texts and not request.branches:
            expected = "whole texts of `Model.embed`: its tokens attend to both sides"
            raise UsageError(str(self.bundle.path), got="logits of a prompt", expected=expected, fix="Use it.")

    def _as_text(self, request: Request) -> tuple[int, ...]:
        """The tokens of a prompt in the vocabulary: rows of pictures as the token that stands for them."""
        vision = self.bundle.manifest.vision
        if vision is None or not request.pictures:
            return request.tokens
        vocab, stands = self.bundle.manifest.model.vocab, vision.pictures.token_id
        return tuple(token if token < vocab else stands for token in request.tokens)

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence its cache; False if another one has it.

        Raises:
            EdgeKVError: see `Runner.begin`; the sequence has ended.
        """
        if not self._scheduler.can_begin(sequence):
            return False
        try:
            self._scheduler.begin(sequence)
            self._runner.begin(sequence)
        except BaseException:
            self.abort(sequence)
            raise
        return True

    def _check_kept(self, sequence: Sequence) -> None:
        """Raise if something else than its end has ended a sequence."""
        if sequence.status == Status.DISPLACED or (self.is_closed and sequence.stop_reason is None):
            self.check_open()
            raise ValueError("generation: its cache is used by a later call of the model; finish one before the next")

    # ------------------------------------------------------------------ steps of all

    def _step_all(self) -> list[tuple[Sequence, Event]]:
        events: list[tuple[Sequence, Event]] = []
        while (sequence := self._scheduler.next()) is not None:
            try:
                self._begin(sequence)
            except BaseException as error:  # panics of Rust libraries are no Exception
                events.append((sequence, error))
        running = [*self.running]
        if self.shares_passes:
            decoding = [sequence for sequence in running if sequence.status == Status.DECODING]
            try:
                self._runner.run_together(decoding, self.batch)
            except BaseException as error:
                events += [(sequence, self._failed(sequence, error)) for sequence in decoding]
        piece_tokens = self._scheduler.piece_tokens
        for sequence in running:
            try:
                while sequence.status < Status.ENDED:
                    is_read = sequence.status != Status.PREFILLING or sequence.unscored is not None
                    if not is_read and self._runner.prefill(sequence, piece_tokens):
                        break
                    brought = self.step(sequence)
                    events += brought
                    if sequence.output is None or sequence.needs_pass or isinstance(brought[0][1], Scores):
                        break
            except BaseException as error:
                events.append((sequence, self._failed(sequence, error)))
        return events

    def _failed(self, sequence: Sequence, error: BaseException) -> BaseException:
        try:
            self.abort(sequence)
        except Exception:  # such as a full disk of the prefix cache: the first error is the one to tell
            traceback.print_exc()
        return error

    # ------------------------------------------------------------------ threads

    def locked(self, work: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
        """Do some work under the lock, and then what was deferred meanwhile. It is not reentrant."""
        try:
            with self.lock:
                return work(*arguments, **options)
        finally:
            self.do_deferred()

    def defer(self, work: Callable[[], object]) -> None:
        """Do some work under the lock: now if it is free, otherwise after the current step.

        Work that Ctrl-C interrupts is done again after the next step.
        """
        self._deferred.append(work)
        self.do_deferred()

    def do_deferred(self) -> None:
        """Do what was deferred, unless a step runs: its end does it, as it looks for it without the lock."""
        while self._deferred and not self.lock.locked():
            with self.lock:
                self._do_all()

    def _do_all(self) -> None:
        while self._deferred:
            try:
                self._deferred[0]()
            except Exception:
                self._deferred.popleft()
                raise
            self._deferred.popleft()

    def free(self, cache: int) -> None:
        """Free the cache of an id, and end what runs in it, from anywhere."""

        def free() -> None:
            if not self.is_closed:
                if (held := self.holder(cache)) is not None:
                    self.abort(held)
                self.pool.free(cache)

        self.defer(free)

    def drop(self, request: Request) -> None:
        """End what runs for a request: the garbage collector may call this while the lock is held."""

        def drop() -> None:
            for sequence in (*self.running, *self.waiting):
                if sequence.request is request:
                    self.abort(sequence)

        self.defer(drop)

    def claim(self, request: Request, owner: ref[object]) -> Sequence:
        """Add a request of this thread and begin it once its cache is free.

        An earlier sequence of this thread, or of one that has ended, is displaced; one of another thread is waited for.

        Args:
            request: it names its cache.
            owner: ends it when it is dropped.

        Raises:
            EdgeKVError: see `Model.generate`.
        """
        freed: SimpleQueue[None] = SimpleQueue()
        while (sequence := self.locked(self._claim, request, owner, freed)) is None:
            with suppress(Empty):
                freed.get(timeout=_POLL_S)
        return sequence

    def _claim(self, request: Request, owner: ref[object], freed: SimpleQueue[None]) -> Sequence | None:
        """As `claim`; None if a sequence of another thread has its cache, whose end `freed` gets."""
        self.check_open()
        assert request.cache is not None, "it names its cache"
        if (held := self.holder(request.cache)) is not None:
            if _is_elsewhere(held):
                if freed not in self._freed:
                    self._freed.append(freed)
                return None
            self.abort(held, Status.DISPLACED)
        sequence = self.add(request)
        self._begin(sequence)
        sequence.thread, sequence.owner = threading.current_thread(), owner
        return sequence

    def _wake(self) -> None:
        """Let those who wait for a cache look again."""
        while self._freed:
            self._freed.pop().put(None)


def _is_elsewhere(sequence: Sequence) -> bool:
    """Whether another thread may go on with a sequence."""
    thread, owner = sequence.thread, sequence.owner
    if thread is None or owner is None:
        return False
    return thread is not threading.current_thread() and thread.is_alive() and owner() is not None


class Call(Iterator[_E]):
    """A request of a thread, as its events. It owns its cache until it ends, is closed, or is dropped.

    Attributes:
        sequence: what the engine runs.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        """Begin a request; this may wait for other threads.

        Raises:
            EdgeKVError: see `Engine.claim`.
        """
        self._engine = engine
        self._drop = finalize(self, engine.drop, request)  # first: what has begun is ended, whatever comes between
        self.sequence = engine.claim(request, ref(self))

    def __next__(self) -> _E:
        """The next event.

        Raises:
            StopIteration: it has ended or was closed.
            ValueError: a later call in the same thread has claimed its cache.
            UsageError: the model was closed, or a logits processor left nothing to choose from.
            EngineError: the runtime failed.
        """
        engine, sequence = self._engine, self.sequence
        while True:
            try:
                with engine.lock:
                    sequence.thread = threading.current_thread()
                    for _, event in engine.step(sequence):
                        return event  # type: ignore[return-value]  # what its request asks for
                    if sequence.status >= Status.ENDED:
                        raise StopIteration
            finally:
                engine.do_deferred()

    def close(self) -> None:
        """End it here and store the computed rows in the prefix cache. Closing twice is harmless."""
        self._engine.locked(self._engine.abort, self.sequence)
        self._drop.detach()


class Generation(Call[Token]):
    """A stream of tokens. The prompt is run when the first token is requested.

    It owns its cache until it ends, is closed (`close`, or a `with` block), or is dropped; then the computed rows are
    stored in the prefix cache, even if it was interrupted. `stats.stop_reason` says why it has ended. `str` gives the
    whole text; `async for` steps in a thread, so that an event loop goes on meanwhile.

    Attributes:
        sequence: what the engine runs.
    """

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        """As `__next__`, with StopAsyncIteration at the end."""
        try:
            token = await asyncio.to_thread(next, self, None)
        finally:
            self.sequence.thread = threading.current_thread()  # a later call in this thread takes the cache over
        if token is None:
            raise StopAsyncIteration
        return token

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self._said[0]
        said = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
        return f"<Generation {said!r}: {self._state}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the text so far with its lines."""
        return f"<pre style='white-space: pre-wrap'>{escape(self._said[0])}</pre><small>{self._state}</small>"

    @property
    def _state(self) -> str:
        state = self.stop_reason or ("interrupted" if self.sequence.has_ended else "running")
        return f"{self.prompt_tokens} + {self._said[1]} tokens, {state}"

    @property
    def text(self) -> str:
        """The whole text: what is left of it is generated first."""
        for _ in self:
            pass
        return self._said[0]

    @property
    def _said(self) -> tuple[str, int]:
        """The text so far, and its tokens."""
        output = self.sequence.output
        return ("", 0) if output is None else ("".join(output.texts), len(output.tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.sequence.request.tokens

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.sequence.prompt_tokens

    @property
    def prefilled_tokens(self) -> int:
        """How many of them its cache has by now; another thread may ask while they run."""
        return self.sequence.prefilled_tokens

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of the prompt."""
        return self.sequence.request.pictures

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it runs or if it was interrupted."""
        return self.sequence.stop_reason

    @property
    def is_whole_text(self) -> bool:
        """Whether the text given so far is that of all tokens generated.

        Not if one of them ends a text, if a stop text was found, if it was cut within a character, or if text is
        withheld that may become either.
        """
        output = self.sequence.output
        return output is not None and output.stream.is_whole

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools so far."""
        output = self.sequence.output
        return () if output is None else output.stream.tool_calls

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return self.sequence.stats


class Scoring(Iterator[NDArray[np.float32]]):
    """Logits `[rows, V]` of the next tokens, teacher forced; other calls of the model can have a step in between.

    It owns the model's own cache until it ends, is closed or is dropped.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        """As `Call`."""
        self._call = Call[Scores](engine, request)

    def __next__(self) -> NDArray[np.float32]:
        """The logits of the next step; first those of the sink, if there is one.

        Raises:
            EdgeKVError: as of `Call`.
        """
        return next(self._call).rows

    def close(self) -> None:
        """End it here. Closing twice is harmless."""
        self._call.close()
