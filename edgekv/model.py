"""A bundle on an engine, with its caches: what applications use."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edgekv.engine.beam_run import BeamResult, check_beams, run_beams
from edgekv.engine.call import BeamCall, SamplingCall, choose_params
from edgekv.engine.generation import Generation
from edgekv.engine.loaded import LoadedBundle
from edgekv.engine.scoring import Scoring
from edgekv.engine.sequence import Sequence
from edgekv.engine.speculate import Speculate, SpeculateMode, make_speculation, speculates
from edgekv.engine.speculation import Speculation
from edgekv.engine.together import advance_together
from edgekv.prefix import RetentionPolicy, open_prefixes
from edgekv.spec.chat import Message
from edgekv.text.params import BeamParams, SamplingParams
from edgekv.text.processors import LogitsProcessor
from edgekv.text.prompt import Prompt
from edgekv.text.sampler import Sampler
from edgekv.text.tools import Tools


class Model(LoadedBundle):
    """A bundle on an engine, its own cache, and one more for each named sequence; see `edgekv.load`.

    Threads may share a model: steps take turns. A call holds its cache until it ends, is closed or dropped: the
    model's own, or that of its `sequence`. A later call for the same cache ends the earlier one if both come from one
    thread; one from another thread waits.
    """

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | int | None = None,
        *,
        messages: abc.Sequence[Message] | None = None,
        tools: Tools | abc.Sequence[Mapping[str, Any]] | None = None,
        **keywords: Unpack[SamplingCall],
    ) -> Generation: ...

    @overload
    def generate(self, prompt: Prompt, params: BeamParams, **keywords: Unpack[BeamCall]) -> BeamResult: ...

    @overload
    def generate(
        self, prompt: Prompt, params: int | None = None, *, num_beams: int, **keywords: Unpack[BeamCall]
    ) -> BeamResult: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | BeamParams | int | None = None,
        *,
        messages: abc.Sequence[Message] | None = None,
        tools: Tools | abc.Sequence[Mapping[str, Any]] | None = None,
        sequence: int | None = None,
        cache_salt: str | None = None,
        retention: RetentionPolicy | None = None,
        processors: abc.Sequence[LogitsProcessor] = (),
        return_logits: bool = False,
        speculate: Speculate | SpeculateMode | Speculation | None = None,
        lora: str | None = None,
        **keywords: Any,
    ) -> Generation | BeamResult:
        """Continue a prompt, from an empty cache or, with `sequence`, from that sequence's cache.

        The prompt is the whole text in both cases, such as all turns of a conversation; tokens that it shares with the
        cache are not run again.

        Args:
            prompt: text, or token ids.
            messages: a conversation instead, rendered by the bundle's chat template.
            tools: functions that the model may call, as OpenAI's API declares them, or `Tools.read(...)` with a choice.
                They are rendered into messages, and bind the answer once it opens a call; `Token.tool_calls` has the
                calls.
            params: a `SamplingParams` or `BeamParams`, used as it is; or a number, which is `max_new_tokens`.
            sequence: a 64-bit id; its cache is created by the first call and kept according to the cache mode.
            cache_salt: prefixes are shared only between calls with equal salts; a salt is never written anywhere.
            retention: how long the prefix cache keeps the blocks of this call.
            processors: change the logits before a token is chosen, after bias and penalties.
            return_logits: give each `Token` the logits of its step.
            speculate: how to draft tokens that one pass checks, as a mode, a `Speculate`, or a new `Speculation` with a
                drafter of your own; the text is the same.
            lora: adapters of the bundle, `NAME` or `NAME=SCALE`, several with commas between; None for the base model.
            keywords: fields of `SamplingParams` that replace `params` or `defaults`; or, with `num_beams`, fields of
                `BeamParams`.

        Returns:
            An iterator of `Token` with `.stats`; of beam search, the sequences and `.stats` once they are known.

        Raises:
            ContextFullError: the prompt is longer than the context and the policy is `fail`; nothing was run.
            MemoryBudgetError: the cache of a new sequence does not fit the mode's budget; nothing was run.
            UsageError: a closed model, an option out of range, an empty prompt, an id that is not in the vocabulary,
                a grammar or tools that are wrong or too complex, a salt or retention without a prefix cache, or
                drafters that do not fit the bundle.
            EngineError: the engine refused a graph, or a grammar needs llguidance, which is not installed.
        """
        self._turns.check_open()
        chosen = choose_params(params, keywords, self.defaults)
        manifest = self.bundle.manifest
        declared = tools if tools is None or isinstance(tools, Tools) else Tools.read(tools)
        tokens = self._prompts.read(self._prompts.text_or_messages(prompt, messages, declared))
        adapter = self.open_lora(lora)
        prefixes = open_prefixes(self._store, cache_salt, retention, None if adapter is None else adapter.key)
        place = (self.sequences, self._graphs, tokens, sequence, prefixes, adapter)
        if isinstance(chosen.params, BeamParams):
            options = {"return_logits": return_logits, "speculates": speculates(speculate)}
            check_beams(manifest, self._caches, sequence, processors, declared, **options)
            beams = Sequence(*place)
            with self._turns.whole_call(None, beams.finish):
                return run_beams(self._graphs, beams, self._setup, chosen.params, manifest, self.tokenizer)
        constraint, reader = self.bind(chosen.params.grammar, declared)
        sampler = Sampler.of(chosen.params, manifest.encodings["logits"], manifest.model.vocab, processors)
        text = (self.tokenizer, manifest.tokens.eos)
        speculation, most = make_speculation(self, speculate), chosen.params.max_new_tokens
        growing = Sequence(*place, speculation=speculation, constraint=constraint, max_new_tokens=most)
        return Generation(
            self._turns,
            growing,
            self._setup,
            chosen,
            sampler,
            *text,
            constraint,
            reader,
            return_logits=return_logits,
        )

    def prepare_together(self) -> None:
        """Allocate and load what `advance_together` needs, which its first call does otherwise.

        Raises:
            EdgeKVError: as `advance_together`.
        """
        _ = self.batch

    def advance_together(self, generations: abc.Sequence[Generation]) -> None:
        """Run the next inference of several generations in one pass of a verify graph; `next` of each then needs none.

        Those that need none, that speculate, or whose tokens find no room beside the others' run by themselves in
        `next`. The texts are the same.

        Args:
            generations: of this model, each with a `sequence` of its own.

        Raises:
            UsageError: the bundle has no verify graphs, keys as columns, layers with attention windows, or a cache that
                grows; the engine gives a token other bits beside others (`cpu`); or the model was closed.
            ValueError: a later call has claimed the sequence of one.
            EngineError: the runtime failed.
        """
        batch = self.batch
        with self._turns:
            advance_together(generations, batch, self._graphs)

    def score(self, tokens: abc.Sequence[int], *, lora: str | None = None) -> NDArray[np.float32]:
        """The logits after each of the tokens, `[T, V]`, teacher forced from an empty cache.

        Args:
            tokens: ids.
            lora: as in `generate`.

        Raises:
            EdgeKVError: as `generate`.
        """
        self._turns.check_open()
        whole = self._prompts.read(tokens, "tokens")
        adapter = self.open_lora(lora)
        with self._turns.whole_call(None):
            self._graphs.prepare("score", "decode")
            self.session.adapt(adapter)
            rows = self.session.score(whole)[-len(tokens) :]
            return self.bundle.manifest.encodings["logits"].dequantize(rows)

    def score_steps(self, tokens: abc.Sequence[int], *, lora: str | None = None) -> Scoring:
        """As `score`, a step at a time; with those of the sink, if the tokens do not begin with it.

        Raises:
            EdgeKVError: as `generate`.
        """
        self._turns.check_open()
        encoding, adapter = self.bundle.manifest.encodings["logits"], self.open_lora(lora)
        whole = self.read(tokens, "tokens")
        return Scoring(self._turns, self.session, self._graphs, encoding, whole, adapter)
