"""A bundle on an engine, with its caches: what applications use."""

from __future__ import annotations

import warnings
from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack, cast, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.draft import CorpusIndex, Speculation, open_corpus
from edgekv.embed import Embedder, RankedDocument, Ranker, ReadText, packed
from edgekv.engine import (
    DEFAULT_CACHE,
    Batch,
    BeamResult,
    BoundAdapter,
    CacheSetup,
    Call,
    Drafting,
    Engine,
    Generation,
    Request,
    Scores,
    Scoring,
    Session,
    SessionPool,
)
from edgekv.engine.call_options import BeamCall, CallOptions, GenerateCall, TextsCall
from edgekv.engine.pictures import Pictures, PictureSource
from edgekv.engine.pool import check_id
from edgekv.errors import EdgeKVWarning, UsageError, refuse
from edgekv.kv import KVCache
from edgekv.pictures import Picture
from edgekv.prefix import PrefixCache, PrefixStore
from edgekv.runtime import Engine as Backend
from edgekv.spec.chat import ChatTemplates
from edgekv.text import PromptInput, Tools
from edgekv.text.params import (
    CHAT_PARAMS,
    BeamParams,
    SamplingParams,
    choose_params,
    default_params,
)

if TYPE_CHECKING:
    from typing import Self

    from tokenizers import Tokenizer

    from edgekv.runtime import ExpertStats


def _are_texts(prompt: object) -> TypeGuard[abc.Sequence[str]]:
    """Whether a prompt is several."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(text, str) for text in prompt)


_OWN_SEQUENCES = count((1 << 64) - 1, -1)
"""From the last id on: callers choose the first ones, or hashes."""


class Model:
    """A bundle on an engine, its own cache, and one more for each named sequence; see `edgekv.load`.

    Threads may share a model: steps take turns. A call holds its cache until it ends, is closed or dropped: the
    model's own, or that of its `sequence`. A later call for the same cache ends the earlier one if both come from one
    thread; one from another thread waits.

    `close`, or leaving a `with` block, frees graphs and caches.

    Attributes:
        bundle: the bundle.
        defaults: default sampling parameters: the bundle's, or greedy decoding.
        chat_defaults: of conversations: the bundle's, or the usual sampling, `edgekv.text.params.CHAT_PARAMS`.
        engine: what runs the calls; only one thread may use it directly, while no other uses the model.
    """

    def __init__(self, bundle: Bundle, backend: Backend, caches: CacheSetup, prefix_cache: PrefixCache | None) -> None:
        """See `edgekv.load`."""
        self.bundle = bundle
        self.defaults = default_params(bundle.manifest.generation)
        self.chat_defaults = default_params(bundle.manifest.generation, CHAT_PARAMS)
        self.engine = Engine(bundle, backend, caches, prefix_cache)
        self._texts = self.engine.texts
        self._pictures = self.engine.pictures
        self._embedding_cache: int | None = None

    def __repr__(self) -> str:
        state = ", closed" if self.engine.is_closed else ""
        name, context = self.bundle.path.name, self.bundle.manifest.context
        return f"<{type(self).__name__} {name} on {self.engine.name}, context {context}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all generations, store their prefixes, and free graphs and caches. Closing twice is harmless.

        A prefix store that the caller opened stays open.
        """
        self.engine.locked(self.engine.close)

    def prepare(self) -> None:
        """Load the graphs now, which the first call does otherwise.

        Raises:
            EngineError: the engine refused a graph.
        """

        def prepare() -> None:
            self.engine.check_open()
            self.engine.graphs.prepare("decode", "prefill")

        self.engine.locked(prepare)

    # ------------------------------------------------------------------ what it is

    @property
    def is_reproducible(self) -> bool:
        """Whether output is independent of what is cached of a prompt."""
        return self.engine.is_reproducible

    @property
    def verify_rows(self) -> abc.Sequence[int]:
        """Tokens per inference of the graphs that check drafts, ascending; none if the bundle has no such graph."""
        return self.engine.verify_rows

    @property
    def expert_stats(self) -> ExpertStats | None:
        """What became of experts since the model was loaded; None without `expert_budget`."""
        return self.engine.graphs.expert_stats

    # Those of caches raise UsageError once the model is closed.

    @property
    def cache(self) -> KVCache:
        """The KV cache of the last call."""
        return self._open_engine.graphs.cache

    @property
    def session(self) -> Session:
        """The model's own cache and its tokens, of calls without `sequence`."""
        return self._open_engine.pool.default

    @property
    def sequences(self) -> SessionPool:
        """The caches of calls with `sequence`."""
        return self._open_engine.pool

    @property
    def prefix_store(self) -> PrefixStore | None:
        """Where computed prefixes are stored; None if there is no prefix cache."""
        return self._open_engine.prefix_store

    @property
    def draft_model(self) -> Drafting:
        """What drafts for another model; see `Speculation`."""
        return self._open_engine.drafting

    @property
    def _open_engine(self) -> Engine:
        """The engine; UsageError if it was closed."""
        self.engine.check_open()
        return self.engine

    @property
    def pictures(self) -> Pictures:
        """Opens pictures, and puts them into prompts."""
        return self.engine.pictures

    def own_sequence(self, owner: object) -> int:
        """A value for `sequence` that nobody else has; its cache is freed when nothing refers to `owner` any more."""
        sequence = next(_OWN_SEQUENCES)
        finalize(owner, self.engine.free, sequence).atexit = False
        return sequence

    # ------------------------------------------------------------------ texts

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self._texts.tokenizer

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the bundle; UsageError if it has none."""
        return self._texts.chat_templates

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text; see `Texts.encode`."""
        return self._texts.encode(prompt)

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a rendered chat template; see `Texts.encode_chat`."""
        return self._texts.encode_chat(text)

    def read(self, prompt: PromptInput, field: str = "prompt") -> list[int]:
        """The tokens that `generate` runs for a prompt: text or ids, with the sink in front if the bundle has one.

        Raises:
            ContextFullError: more tokens than the context and the policy is `fail`.
            UsageError: no tokens, an id that is not in the vocabulary, or the tokenizer fails.
        """
        return self._texts.read(prompt, field)

    def open_corpus(self, path: str | Path, field: str = "draft corpus") -> CorpusIndex:
        """The index of a text file to draft from; see `edgekv.draft.open_corpus`.

        Raises:
            UsageError: the file is no text, too large, or cannot be read.
        """
        return open_corpus(Path(path), self.tokenizer, self.bundle.manifest.model.vocab, field)

    def open_picture(self, source: PictureSource, field: str = "picture") -> Picture:
        """A picture for `generate`, resized and cut into tiles. It is encoded when a cache needs its rows.

        Raises:
            UsageError: the bundle reads text alone, or the file is no picture, damaged or too large.
            ContextFullError: it has more tokens than the context.
            EngineError: Pillow is not installed.
        """
        (picture,) = self._pictures.open([source], [field])
        return picture

    def open_lora(self, lora: str | None) -> BoundAdapter | None:
        """The adapters that a call names, ready to be bound; None for the base model.

        Raises:
            UsageError: the bundle has none of a name, or they do not fit into the slots together.
            BundleError: one is damaged.
        """
        return self.engine.locked(self.engine.open_lora, lora)

    # ------------------------------------------------------------------ calls

    @overload
    def generate(
        self, prompt: PromptInput, params: int | None = None, *, num_beams: int, **keywords: Unpack[BeamCall]
    ) -> BeamResult: ...

    @overload
    def generate(self, prompt: PromptInput, params: BeamParams, **keywords: Unpack[BeamCall]) -> BeamResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: SamplingParams | int | None = None,
        **keywords: Unpack[TextsCall],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompt: PromptInput | None = None,
        params: SamplingParams | int | None = None,
        **keywords: Unpack[GenerateCall],
    ) -> Generation: ...

    def generate(
        self,
        prompt: PromptInput | list[str] | tuple[str, ...] | None = None,
        params: SamplingParams | BeamParams | int | None = None,
        **keywords: Any,
    ) -> Generation | list[Generation] | BeamResult:
        """Continue a prompt, from an empty cache or, with `sequence`, from that sequence's cache.

        The prompt is the whole text in both cases, such as all turns of a conversation; tokens that it shares with the
        cache are not run again.

        Args:
            prompt: text, or token ids; or a list of texts, which run to their ends one after another.
            params: a `SamplingParams` or `BeamParams`, used as it is; or a number, which is `max_new_tokens`.
            keywords: fields of `SamplingParams` that replace `params` or `defaults`; or, with `num_beams`, fields of
                `BeamParams`; and the following.

        Keyword Args:
            messages: a conversation instead, rendered by the bundle's chat template.
            tools: functions that the model may call, as OpenAI's API declares them, or `Tools.read(...)` with a choice.
                They are rendered into messages, and bind the answer once it opens a call; `Token.tool_calls` has the
                calls.
            sequence: a 64-bit id; its cache is created by the first call and kept according to the cache mode.
            cache_salt: prefixes are shared only between calls with equal salts; a salt is never written anywhere.
            retention: how long the prefix cache keeps the blocks of this call.
            processors: change the logits before a token is chosen, after bias and penalties.
            thoughts: give the model's thoughts as `Token.thoughts`, not as `Token.text`, if the bundle's template has
                marks for them; None for messages only.
            return_logits: give each `Token` the logits of its step.
            speculate: how to draft tokens that one pass checks, as a mode or a `Speculation`; the text is the same.
            lora: adapters of the bundle, `NAME` or `NAME=SCALE`, several with commas between; None for the base model.
            pictures: files, their content, or what `open_picture` gives. They stand where the prompt or the messages
                have the model's token for a picture, in this order, or in front if they have none.

        Returns:
            An iterator of `Token` with `.text` and `.stats`; a list of them for a list of texts; of beam search, the
            sequences and `.stats` once they are known.

        Raises:
            ContextFullError: the prompt is longer than the context and the policy is `fail`; nothing was run.
            MemoryBudgetError: the cache of a new sequence does not fit the mode's budget; nothing was run.
            UsageError: a closed model, an option out of range, an empty prompt, an id that is not in the vocabulary,
                a grammar or tools that are wrong or too complex, a salt or retention without a prefix cache, or
                drafters that do not fit the bundle; a picture that cannot be read, or pictures for a bundle of text.
            EngineError: the engine refused a graph, or a grammar needs llguidance, which is not installed.
        """
        self.engine.check_open()
        options, of_params = CallOptions.split(keywords)
        if _are_texts(prompt):
            for name in ("messages", "tools", "sequence"):
                if getattr(options, name) is not None:
                    refuse(name, "it with a list of texts", "a single prompt", "Call generate for each.")
            if isinstance(params, BeamParams) or "num_beams" in of_params or options.pictures:
                refuse("prompt", "a list of texts with beams or pictures", "a single text", "Call generate for each.")
            return [self._generated(text, params, keywords) for text in prompt]
        chosen, bundle_defaults = choose_params(params, of_params, self.defaults)
        messages, tools, thoughts = options.messages, options.tools, options.thoughts
        declared = tools if tools is None or isinstance(tools, Tools) else Tools.read(tools)
        field = "prompt" if messages is None else "messages"
        numbered = [f"pictures[{number}]" for number in range(len(options.pictures))]
        opened = tuple(self._pictures.open(options.pictures, numbered, salt=options.cache_salt))
        text = self._texts.text_or_messages(
            cast("PromptInput | None", prompt),
            messages,
            declared,
            written=lambda text: self._pictures.expanded(text, opened, field),
            rendered=lambda told, render: self._pictures.rendered(told, opened, render),
        )
        request = Request(
            self._pictures.put(self._texts.read(text), opened, field),
            chosen,
            cache=DEFAULT_CACHE if options.sequence is None else check_id(options.sequence),
            salt=options.cache_salt,
            retention=options.retention,
            processors=tuple(options.processors),
            tools=declared,
            speculation=Speculation.read(options.speculate),
            lora=options.lora,
            reads_thoughts=messages is not None if thoughts is None else thoughts,
            returns_logits=options.return_logits,
            pictures=opened,
            bundle_defaults=bundle_defaults,
        )
        if isinstance(chosen, SamplingParams):
            return Generation(self.engine, request)
        search = Call[BeamResult](self.engine, request)
        try:
            return next(search)
        finally:
            search.close()

    def _generated(self, prompt: str, params: SamplingParams | int | None, options: Mapping[str, Any]) -> Generation:
        """What `generate` gives, run to its end."""
        generation = self.generate(prompt, params, **options)
        _ = generation.text
        return generation

    def embed(
        self,
        texts: abc.Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """The embeddings of texts, `[texts, dimensions]`.

        As many texts share a pass as the bundle's largest graph has rows. Longer ones run one after another in a cache
        of their own: what one begins with as the text before it is not run again.

        Args:
            texts: none of them empty.
            prompt_name: whose text the bundle puts in front of each, such as `query`; None for the bundle's default.
            dimensions: the first elements that are wanted, normalized like all; None for all.
            truncate: whether the end of a text that is too long is left out.

        Raises:
            ContextFullError: a text is too long; nothing was run.
            UsageError: a bundle that writes text, an empty text, a name that the bundle has no prompt of, or more
                dimensions than there are; nothing was run.
            EngineError: the engine refused a graph.
        """
        self.engine.check_open()
        embedder = Embedder(self.bundle, self._texts)
        if isinstance(texts, str):
            raise UsageError("texts", got="a text", expected="a list of texts", fix="Give [text].")
        width, prompt = embedder.check_dimensions(dimensions), embedder.prompt(prompt_name)
        cut_to = embedder.max_tokens if truncate else None
        read = [
            embedder.read(text, f"texts[{number}]", prompt=prompt, cut_to=cut_to) for number, text in enumerate(texts)
        ]
        _warn_of_cuts("texts", read)
        vectors = np.empty((len(read), width), np.float32)
        for number, rows in self._rows([text.request for text in read]):
            vectors[number] = embedder.embedding(read[number], rows, width)
        return vectors

    def rerank(
        self,
        query: str,
        documents: abc.Sequence[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        truncate: bool = False,
    ) -> list[RankedDocument]:
        """Documents by how well they fit a query, best first.

        As many share a pass as the bundle's largest graph has rows; the query, which they share, is run once.

        Args:
            query: not empty.
            documents: none of them empty.
            instruction: what the query asks for, if the model's template has a place for it; None for the model's own.
            top_n: how many of the best are wanted; None for all.
            truncate: whether the end of a document that is too long is left out.

        Raises:
            ContextFullError: a document is too long with the query; nothing was run.
            UsageError: a bundle of another kind, an empty text, an instruction without a place for it, or a number
                below 1; nothing was run.
            EngineError: the engine refused a graph.
        """
        self.engine.check_open()
        ranker = Ranker(self.bundle, self._texts)
        if isinstance(documents, str):
            raise UsageError("documents", got="a text", expected="a list of texts", fix="Give [text].")
        if top_n is not None and top_n < 1:
            raise UsageError("top_n", got=top_n, expected="at least 1", fix="Leave it out for all.")
        ranker.check(query, instruction)
        cut_to = ranker.max_tokens if truncate else None
        read = [
            ranker.read(query, text, f"documents[{number}]", instruction=instruction, cut_to=cut_to)
            for number, text in enumerate(documents)
        ]
        _warn_of_cuts("documents", read)
        scores = dict.fromkeys(range(len(read)), 0.0)
        for number, rows in self._rows([document.request for document in read]):
            scores[number] = ranker.score(rows)
        return ranker.ranked([*scores.values()], top_n)

    def _rows(self, requests: abc.Sequence[Request]) -> abc.Iterator[tuple[int, NDArray[np.float32]]]:
        """The number of each text and what it gives, `[rows, width]`, in any order; in the cache of such texts."""
        if self._embedding_cache is None:
            self._embedding_cache = self.own_sequence(self)
        for pack in packed(requests, self.engine.branch_rows, self.bundle.manifest):
            request = replace(pack.request, cache=self._embedding_cache)
            yield from pack.rows_of(np.concatenate([scores.rows for scores in Call[Scores](self.engine, request)]))

    @property
    def batch(self) -> Batch:
        """Runs passes of several generations; it has a cache of its own.

        Raises:
            UsageError: the bundle or the engine cannot.
            EngineError: the engine refused the verify graph.
        """

        def made() -> Batch:
            self.engine.check_open()
            return self.engine.batch

        return self.engine.locked(made)

    def score(self, tokens: abc.Sequence[int], *, lora: str | None = None) -> NDArray[np.float32]:
        """The logits after each of the tokens, `[T, V]`, teacher forced from an empty cache.

        Args:
            tokens: ids.
            lora: as in `generate`.
        """
        rows: NDArray[np.float32] = np.concatenate([*self.score_steps(tokens, lora=lora)])[-len(tokens) :]
        return rows

    def score_steps(self, tokens: abc.Sequence[int], *, lora: str | None = None) -> Scoring:
        """As `score`, a step at a time; with those of the sink, if the tokens do not begin with it."""
        self.engine.check_open()
        whole = self._texts.read(tokens, "tokens")
        return Scoring(self.engine, Request(tuple(whole), cache=DEFAULT_CACHE, lora=lora, scores=True))


def _warn_of_cuts(field: str, texts: abc.Sequence[ReadText]) -> None:
    """Warn of the texts that were cut, from the caller of the method that calls this."""
    cut = {number: text for number, text in enumerate(texts) if text.cut_tokens}
    if cut:
        first, others = next(iter(cut.items())), len(cut) - 1
        more = f"; and that of {others:,} of the others" if others else ""
        text = f"{field}[{first[0]}]: its end was left out, {first[1].cut_tokens:,} tokens or more{more}"
        warnings.warn(text, EdgeKVWarning, stacklevel=3)
