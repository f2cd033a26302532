"""A bundle on an engine: its graphs, sessions, prompts and prefix cache, until it is closed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgekv.bundle import Bundle, GenerationRecord
from edgekv.draft import CorpusIndex, DraftRecord, open_corpus
from edgekv.engine.adapters import Adapters, BoundAdapter, LoraChoice
from edgekv.engine.batch import Batch, make_batch
from edgekv.engine.caches import CacheSetup
from edgekv.engine.draft_sessions import DraftSessions
from edgekv.engine.graphs import Graphs
from edgekv.engine.pool import SessionPool
from edgekv.engine.session import Session
from edgekv.engine.turns import Turns
from edgekv.errors import BundleError, UsageError
from edgekv.kv import KVCache
from edgekv.prefix import PrefixCache, PrefixStore, open_store
from edgekv.runtime import Engine
from edgekv.spec.chat import ChatTemplates
from edgekv.text.constraint import Constraint, GrammarCompiler
from edgekv.text.grammar import Grammar
from edgekv.text.params import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from edgekv.text.prompt import Prompt, PromptReader
from edgekv.text.tools import ToolCallReader, Tools, find_format, special_tokens, tools_grammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class LoadedBundle:
    """What the calls of a model share. `close`, or leaving a `with` block, frees graphs and caches.

    Attributes:
        bundle: the bundle.
        engine: name of the engine.
        mode: which sequences are kept from one step to the next.
        window: of its sessions; see `Session`.
        session: the model's own session, of calls without `sequence`.
        sequences: the sessions of calls with `sequence`.
        draft_sessions: those of calls that draft with this model for another.
        defaults: default sampling parameters: the bundle's, or greedy decoding.
        draft_record: what speculation measured.
        used_batch: `batch`, once it was needed.
    """

    def __init__(self, bundle: Bundle, engine: Engine, caches: CacheSetup, prefix_cache: PrefixCache | None) -> None:
        graphs = Graphs(bundle, engine, caches.make())
        self.bundle = bundle
        self.engine: str = engine.name
        self.mode = caches.mode
        self.defaults = default_params(bundle.manifest.generation)
        self.window = graphs.most("prefill") if caches.reproducible and graphs.row_bits != "equal" else 0
        self.session = Session(graphs.cache, graphs, self.window)
        self.draft_record = DraftRecord()
        self.used_batch: Batch | None = None
        self._turns = Turns()
        self.sequences = SessionPool(
            lambda: Session(caches.make(), graphs, self.window), caches.mode, self.session, self._turns
        )
        self.draft_sessions = DraftSessions(self.sequences)
        self._caches = caches
        self._setup = caches.described(engine)
        self._prompts = PromptReader(bundle, caches.policy.name)
        self._store = open_store(bundle, engine.name, graphs.cache, caches.mode, prefix_cache, self.window)
        self._graphs = graphs
        self._adapters = Adapters(bundle)

    def __repr__(self) -> str:
        state = ", closed" if self._turns.is_closed else ""
        name, context = self.bundle.path.name, self.bundle.manifest.context
        return f"<{type(self).__name__} {name} on {self.engine}, context {context}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all generations, store their prefixes, and free graphs and caches. Closing twice is harmless.

        A prefix store that the caller opened stays open.
        """
        if not self._turns.is_closed:
            self._turns.close()
            if self._store is not None:
                self._store.close()
            self.used_batch = None
            del self._graphs, self.session, self.sequences, self._store

    def prepare(self) -> None:
        """Load the graphs now, which the first call does otherwise.

        Raises:
            EngineError: the engine refused a graph.
        """
        self._turns.check_open()
        with self._turns:
            self._graphs.prepare("decode", "prefill")

    @property
    def is_reproducible(self) -> bool:
        """Whether a prompt has the same answer whatever is cached of it."""
        return self.window > 0 or self._graphs.row_bits == "equal"

    @property
    def cache(self) -> KVCache:
        """The KV cache of the last call."""
        return self._graphs.cache

    @property
    def prefix_store(self) -> PrefixStore | None:
        """Where computed prefixes are stored; None if there is no prefix cache."""
        return None if self._store is None else self._store.store

    @property
    def verify_rows(self) -> list[int]:
        """Tokens per inference of the graphs that check drafts, ascending; none if the bundle has no such graph."""
        return sorted({graph.ar for graph in self.bundle.manifest.graphs if graph.role == "verify"})

    @property
    def evicts_tokens(self) -> bool:
        """Whether a full context drops old tokens, so that any number fits: another policy than `fail`."""
        return self._caches.policy.name != "fail"

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may branch: rows of branches are in other columns than in single steps."""
        return self._graphs.row_bits == "equal"

    @property
    def batch(self) -> Batch:
        """Runs passes of several generations; it has a cache of its own.

        Raises:
            UsageError: the bundle or the engine cannot.
            EngineError: the engine refused the verify graph.
        """
        if self.used_batch is None:
            self._turns.check_open()
            with self._turns:
                self.used_batch = make_batch(self._graphs, self._caches)
        return self.used_batch

    def open_corpus(self, path: str | Path, field: str = "draft corpus") -> CorpusIndex:
        """The index of a text file to draft from; see `edgekv.draft.open_corpus`.

        Raises:
            UsageError: the file is no text, too large, or cannot be read.
        """
        return open_corpus(Path(path), self.tokenizer, self.bundle.manifest.model.vocab, field)

    def open_lora(self, lora: str | None) -> BoundAdapter | None:
        """The adapters that a call names, ready to be bound; None for the base model. Thread-safe.

        Raises:
            UsageError: the bundle has none of a name, or they do not fit into the slots together.
            BundleError: one is damaged.
        """
        if lora is None:
            return None
        choices = LoraChoice.parse(lora)
        with self._turns:
            return self._adapters.open(choices)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self._prompts.tokenizer

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text; see `PromptReader.encode`."""
        return self._prompts.encode(prompt)

    def read(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """The tokens that `generate` runs for a prompt: text or ids, with the sink in front if the bundle has one.

        Raises:
            ContextFullError: more tokens than the context and the policy is `fail`.
            UsageError: no tokens, an id that is not in the vocabulary, or the tokenizer fails.
        """
        return self._prompts.read(prompt, field)

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the bundle; UsageError if it has none."""
        return self._prompts.chat_templates

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a rendered chat template; see `PromptReader.encode_chat`."""
        return self._prompts.encode_chat(text)

    def bind(self, grammar: Grammar | None, tools: Tools | None) -> tuple[Constraint | None, ToolCallReader | None]:
        """The constraint of an answer and the reader of its calls, each None if there is none.

        Both are new; what is compiled for them is kept. Thread-safe, so that it can be done before a call.

        Raises:
            UsageError: a grammar that is wrong or too complex, a grammar together with tools, or tools and no chat
                template.
            EngineError: llguidance is not installed.
        """
        if tools is not None and tools.callable:
            if grammar is not None:
                fix = "Leave one of them out."
                raise UsageError("grammar", got="one together with tools", expected="one of them", fix=fix)
            form = find_format(self.chat_templates)
            special = special_tokens(self.tokenizer, form, self._grammars.is_special)
            reader = ToolCallReader(form, special)
            try:
                return self._compiled(tools_grammar(tools, form, special)), reader
            except UsageError as error:
                self._check_each(tools)
                raise UsageError("tools", got=error.got, expected=error.expected, fix=error.fix) from None
        return self._compiled(grammar), None

    def _check_each(self, tools: Tools) -> None:
        """Raise UsageError naming the tool whose schema is wrong by itself."""
        for number, tool in enumerate(tools.tools):
            if tool not in tools.callable:
                continue
            try:
                self._grammars.compile(Grammar.json_schema(tool.parameters))
            except UsageError as error:
                field = f"tools[{number}].function.parameters"
                raise UsageError(field, got=error.got, expected=error.expected, fix=error.fix) from None

    def _compiled(self, grammar: Grammar | None) -> Constraint | None:
        return None if grammar is None else self._grammars.compile(grammar)

    @property
    def compiling_grammars(self) -> int:
        """Grammars that are compiled now, with those that take too long; for any thread."""
        return self._grammars.compiling if "_grammars" in self.__dict__ else 0

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        """Compiles the grammars of calls."""
        manifest = self.bundle.manifest
        return GrammarCompiler(self.tokenizer, manifest.model.vocab, manifest.tokens.eos)


def default_params(record: GenerationRecord | None) -> SamplingParams:
    """The bundle's defaults; greedy decoding if it has none.

    Raises:
        BundleError: a value that sampling refuses.
    """
    if record is None:
        return SamplingParams()
    try:
        return SamplingParams(
            record.temperature,
            record.top_k,
            record.top_p,
            min_p=record.min_p,
            repetition_penalty=record.repetition_penalty,
            max_new_tokens=record.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        )
    except UsageError as error:
        fix = "Export the bundle again from a checkpoint with a correct generation_config.json."
        raise BundleError(
            f"manifest.json: generation: {error.field}", got=error.got, expected=error.expected, fix=fix
        ) from None
