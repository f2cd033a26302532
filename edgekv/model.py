"""A bundle on an engine, with a cache: what applications use."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, overload
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, Role, open_bundle
from edgekv.errors import UsageError
from edgekv.kv import DEFAULT_RESERVE, Geometry, GrowthName, KVCache, Policy, parse_growth, parse_reserve
from edgekv.kv.policies.text import parse_policy
from edgekv.prefix import PrefixCache, Prefixes, PrefixStore, RetentionPolicy, open_store
from edgekv.runtime import Engine, EngineName, Runner, make_engine
from edgekv.session import (
    Always,
    Detokenizer,
    Generation,
    HeldSequence,
    Mode,
    Sampler,
    Sampling,
    SequenceFeeder,
    SequenceManager,
    StopSequences,
    check_mode,
    parse_mode,
)
from edgekv.session.beam import BeamOptions, BeamSearch, EarlyStopping, refuse_beam_options, refuse_sampling
from edgekv.session.beam_run import BeamResult, run_beams
from edgekv.session.loop import Setup
from edgekv.session.prompt import PromptReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Nothing is re-bound, and one strided write a step costs less host time than 2 N bindings: see `benchmarks/`.
DEFAULT_KV_UPDATE = "slot"


def load(
    bundle: str | Path | Bundle,
    engine: str = "cpu",
    *,
    kv_update: str | None = None,
    reserve: Fraction | float | str | None = None,
    policy: str | Policy = "fail",
    threads: int | None = None,
    cache_mode: str | Mode = "always",
    prefix_cache: PrefixCache | None = None,
    kv_growth: GrowthName | str | None = None,
    verify: bool = True,
) -> Model:
    """Open a bundle and get it ready to run.

    Args:
        bundle: its folder, or what `open_bundle` gave.
        engine: `cpu` or `htp` for a bundle of ONNX graphs, `litert` or `tflite` for one of TFLite graphs.
        kv_update: one of `edgekv.kv.STRATEGIES`; None for `slot` (`pointer-shift` if a reserve is given).
        reserve: memory of `pointer-shift`, in units of S-1 rows per tensor, above 1, at most 2; None for 2.
        policy: what happens when the context is full, as text or as a policy of `edgekv.kv`. `fail` ends a generation;
            `sliding-window` forgets the oldest tokens; `sinks(N, WINDOW)` keeps the first N and the newest WINDOW, at
            positions within the context; `keydiff(BUDGET)` or `keydiff(BUDGET, RECENT)` keeps the BUDGET tokens whose
            keys are least like the mean key, the RECENT newest (an eighth) among them. What is kept must leave room
            for the graph with the most tokens per inference.
        threads: of one operation, on a CPU; None leaves it to the runtime.
        cache_mode: what is kept from one step to the next, as text or as a mode of `edgekv.session`: `always`,
            `long-sequence-only(TOKENS)`, `adaptive`, `adaptive(64MiB)`, `adaptive(25%)` or `disabled`.
        prefix_cache: where beginnings of prompts are kept that need not be run again: a folder, for later processes
            too; a `StoreConfig`; or a `PrefixStore` that several models of this bundle and engine share. None uses
            what was baked into the bundle, and keeps nothing. Wants the mode `always` or `adaptive`.
        kv_growth: of a bundle with several contexts, with `slot` or `pointer-shift`: the cache's memory is made for the
            least context and grows to the next when tokens need it, `staggered` (one layer after the other) or
            `together`; None makes all of it for the largest.
        verify: False skips the hashes of the bundle's files.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        PrefixError: a configuration of the prefix cache that cannot be, or a folder that cannot be written.
        UsageError: an unknown name, numbers that leave no room, or options that do not go together.
        EngineError: the engine is missing or refused a graph.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
    return Model(
        opened,
        engine,
        kv_update=kv_update,
        reserve=reserve,
        policy=policy,
        threads=threads,
        cache_mode=cache_mode,
        prefix_cache=prefix_cache,
        kv_growth=kv_growth,
    )


class Model:
    """A bundle, an engine, a cache, and as many sequences with caches of their own as are asked for; see `load`.

    Attributes:
        bundle: the bundle.
        engine: name of the engine.
        mode: what is kept from one step to the next.
        sequences: the sequences that `generate(..., sequence=ID)` keeps.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: str = "cpu",
        *,
        kv_update: str | None = None,
        reserve: Fraction | float | str | None = None,
        policy: str | Policy = "fail",
        threads: int | None = None,
        cache_mode: str | Mode = "always",
        prefix_cache: PrefixCache | None = None,
        kv_growth: GrowthName | str | None = None,
    ) -> None:
        manifest = bundle.manifest
        strategy = kv_update or (DEFAULT_KV_UPDATE if reserve is None else "pointer-shift")
        if reserve is not None and strategy != "pointer-shift":
            found, fix = f"{reserve} with {strategy}", "Leave it out, or choose pointer-shift."
            raise UsageError("reserve", got=found, expected="the update strategy pointer-shift", fix=fix)
        ratio = DEFAULT_RESERVE if reserve is None else parse_reserve(reserve)
        made = make_engine(engine, bundle=bundle, threads=threads)
        _check_alignment(made, manifest.geometry, strategy)
        self.bundle = bundle
        self.engine: EngineName = made.name
        self.mode = parse_mode(cache_mode) if isinstance(cache_mode, str) else cache_mode
        chosen = parse_policy(policy, manifest.rope.inverse_frequencies) if isinstance(policy, str) else policy
        if (manifest.local_rope is not None or manifest.unrotated_layers) and chosen.inverse_frequencies:
            raise UsageError(
                f"context policy {chosen.name}",
                got=f"layers with{'out a rotary embedding' if manifest.unrotated_layers else ' two rotary embeddings'}",
                expected="one, by which the keys of all layers can be moved",
                fix="Use fail or sliding-window.",
            )

        if kv_growth is not None and self.mode.budget is not None:
            found, fix = f"{kv_growth} with {self.mode}", "Leave it out, or choose another cache mode."
            wanted = "a cache mode without a memory budget, which counts on sequences of one size"
            raise UsageError("growth", got=found, expected=wanted, fix=fix)
        growth = None if kv_growth is None else parse_growth(kv_growth, manifest.contexts)

        def make_cache() -> KVCache:
            ar = {g.ar for g in manifest.graphs}
            return KVCache(
                manifest.cache_geometry,
                ar=ar,
                strategy=strategy,
                reserve=ratio,
                policy=chosen,
                encodings=[manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()],
                growth=growth,
            )

        self._own = HeldSequence(make_cache())
        check_mode(self.mode, self._own.cache)
        self._prompts = PromptReader(bundle)
        self._shared = open_store(bundle, made.name, self._own.cache, self.mode, prefix_cache)
        self._growth = growth.name if growth else None
        self._setup = Setup(
            made.name, strategy, float(ratio) if strategy == "pointer-shift" else None, str(self.mode), self._growth
        )
        self._runner = Runner(bundle, made, self._own.cache)
        self.sequences = SequenceManager(
            make_cache,
            bytes_per_sequence=self._own.cache.stats.bytes_held,
            budget=self.mode.budget,
            evicts=self.mode.evicts,
            release=self._release,
        )
        # By sequence; None stands for the model's own cache. Whoever has let go of a generation will not go on with it.
        self._current: WeakValueDictionary[int | None, Generation] = WeakValueDictionary()

    @property
    def cache(self) -> KVCache:
        """The KV cache that ran last, as that call left it."""
        return self._runner.cache

    @property
    def prefix_store(self) -> PrefixStore | None:
        """Where beginnings of prompts are kept; None if there is none."""
        return None if self._shared is None else self._shared.store

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self._prompts.tokenizer

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text; see `PromptReader.encode`."""
        return self._prompts.encode(prompt)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        sequence: int | None = None,
        cache_salt: str | None = None,
        retention: RetentionPolicy | None = None,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        num_beams: int,
        num_return_sequences: int | None = None,
        length_penalty: float | None = None,
        early_stopping: EarlyStopping | None = None,
        cache_salt: str | None = None,
        retention: RetentionPolicy | None = None,
    ) -> BeamResult: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        sequence: int | None = None,
        num_beams: int | None = None,
        num_return_sequences: int | None = None,
        length_penalty: float | None = None,
        early_stopping: EarlyStopping | None = None,
        cache_salt: str | None = None,
        retention: RetentionPolicy | None = None,
    ) -> Generation | BeamResult:
        """Continue a prompt.

        Without `sequence` from an empty cache. With it from what that sequence's cache holds: the prompt is still
        the whole text, as in a conversation all turns so far. The beginning that it shares with the tokens of the
        calls before is not run again, and what does not fit is dropped. Text that is tokenized in one piece may differ
        in its tokens where an answer met the next question; giving token ids (`.prompt`, the `.id` of each token,
        then the new ones) reuses all of it. The result is that of an empty cache: bit by bit on the HTP, up to the
        order of sums on the CPU. Only where tokens have left by a context policy, continuing and starting anew differ.

        Args:
            prompt: text, or token ids.
            max_new_tokens: at most so many tokens are generated.
            temperature: 0 is greedy.
            top_k: only the k most likely tokens.
            top_p: only the most likely tokens whose probabilities reach p together.
            seed: of the random numbers; None draws one.
            stop: texts before which the generation ends.
            sequence: a 64-bit id; its cache is made at the first call and kept as the caching mode says.
            num_beams: search the likeliest sequences with so many beams instead, as Hugging Face transformers
                does; see `BeamOptions` for this and what follows. Excludes the options from `temperature` on.
            num_return_sequences: so many of the sequences found; None for 1.
            length_penalty: None for 1.
            early_stopping: None for False.
            cache_salt: prefixes are shared among calls of equal salts alone; a salt is never written anywhere.
            retention: how long the prefix cache keeps the blocks of this call.

        Returns:
            An iterator of `Token` with `.stats`. A later call for the same sequence ends it, and one without a
            sequence (`score` too) is ended by a later one without. Others may take turns. With `num_beams`, the
            sequences and `.stats`, once they are known.

        Raises:
            ContextFullError: the prompt is longer than the context and the policy is `fail`; nothing was run.
            MemoryBudgetError: the cache of a new sequence does not fit the mode's budget; nothing was run.
            UsageError: an option out of range, an empty prompt, an id that is not in the vocabulary, or a salt or
                retention without a prefix cache.
            EngineError: the engine refused a graph.
        """
        if num_beams is not None:
            refuse_sampling(temperature, top_k, top_p, seed, stop)
            if sequence is not None:
                found, fix = f"{sequence} with num_beams", "Leave one of them out."
                raise UsageError("sequence", got=found, expected="none with num_beams", fix=fix)
            options = BeamOptions(
                num_beams,
                1 if num_return_sequences is None else num_return_sequences,
                1.0 if length_penalty is None else length_penalty,
                False if early_stopping is None else early_stopping,
            )
            return self._search(prompt, max_new_tokens, options, self._feeder(None, cache_salt, retention))
        refuse_beam_options(num_return_sequences, length_penalty, early_stopping)
        sampler = Sampler(Sampling(temperature, top_k, top_p, seed), self.bundle.manifest.encodings["logits"])
        stops = StopSequences(stop)
        tokens = self._read(prompt)
        feeder = self._feeder(sequence, cache_salt, retention)
        generation = Generation(
            feeder,
            tokens,
            self._setup,
            max_new_tokens=max_new_tokens,
            eos=self.bundle.manifest.tokens.eos,
            sampler=sampler,
            detokenizer=Detokenizer(self.tokenizer, tokens),
            stops=stops,
        )
        feeder.claim(len(tokens))
        self._start(sequence, "decode", *(("prefill",) if len(tokens) > 1 else ()))
        self._current[sequence] = generation
        return generation

    def _search(
        self, prompt: str | Sequence[int], max_new_tokens: int, options: BeamOptions, feeder: SequenceFeeder
    ) -> BeamResult:
        manifest = self.bundle.manifest
        if self.cache.policy != "fail":
            fix = "Choose the policy fail, or leave num_beams out."
            raise UsageError("context policy", got=f"{self.cache.policy} with num_beams", expected="fail", fix=fix)
        if not isinstance(self.mode, Always):
            fix = "Choose the mode always, or leave num_beams out."
            raise UsageError("cache mode", got=f"{self.mode} with num_beams", expected="always", fix=fix)
        if self._growth is not None:
            found, fix = f"{self._growth} with num_beams", "Leave one of them out."
            raise UsageError("growth", got=found, expected="none with num_beams", fix=fix)
        if manifest.key_layout != "rows" or manifest.windows:
            raise UsageError(
                "num_beams",
                got="keys as columns" if manifest.key_layout != "rows" else "layers with an attention window",
                expected="keys as rows, and layers that all attend to the whole context",
                fix="Leave num_beams out, or export another bundle for it.",
            )
        tokens = self._read(prompt)
        # The S-th token is the last one to be run; one more can be chosen.
        room = manifest.context + 1 - len(tokens)
        search = BeamSearch(
            options, eos=manifest.tokens.eos, max_new_tokens=min(max_new_tokens, room), vocab=manifest.model.vocab
        )
        self._start(None, "decode", *(("prefill",) if len(tokens) > 1 else ()))
        return run_beams(
            self._runner,
            feeder,
            tokens,
            self._setup,
            search,
            limit="length" if max_new_tokens <= room else "context",
            encoding=manifest.encodings["logits"],
            tokenizer=self.tokenizer,
        )

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each of the tokens, `[T, V]`, teacher forced from an empty cache.

        Raises:
            ContextFullError: more tokens than the context holds and the policy is `fail`; nothing was run.
            UsageError: no tokens, or an id that is not in the vocabulary.
            EngineError: the engine refused a graph.
        """
        tokens = self._read(tokens, "tokens")
        self._start(None, "score", "decode")
        return self.bundle.manifest.encodings["logits"].dequantize(self._runner.feed_all(tokens))

    def _start(self, sequence: int | None, *roles: Role) -> None:
        earlier = self._current.pop(sequence, None)
        if earlier is not None:
            earlier.abandon()
        self._runner.prepare(*roles)
        if sequence is None:
            self._own.reset()
            self._runner.use(self._own.cache)

    def _release(self, cache: KVCache) -> None:
        if cache is self._runner.cache:
            self._runner.use(self._own.cache)

    def _read(self, prompt: str | Sequence[int], field: str = "prompt") -> list[int]:
        return self._prompts.read(prompt, field, self.cache.policy)

    def _feeder(self, sequence: int | None, salt: str | None, retention: RetentionPolicy | None) -> SequenceFeeder:
        if self._shared is None and (salt is not None or retention is not None):
            found, fix = "one without a prefix cache", "Give load(..., prefix_cache=...), or leave it out."
            field = "retention" if salt is None else "cache_salt"
            raise UsageError(field, got=found, expected="a prefix cache", fix=fix)
        prefixes = None if self._shared is None else Prefixes(self._shared, salt, retention)
        return SequenceFeeder(self._runner, self.mode, self._own, self.sequences, sequence, prefixes)


def _check_alignment(engine: Engine, geometry: Geometry, strategy: str) -> None:
    """Refuse a window that moves by rows to addresses that the engine cannot be bound to."""
    if geometry.row_bytes % engine.alignment_bytes and strategy != "slot":
        raise UsageError(
            "update strategy",
            got=f"{strategy} with rows of {geometry.row_bytes} bytes on the engine {engine.name}",
            expected=f"rows of a multiple of {engine.alignment_bytes} bytes, which it can be bound to anywhere",
            fix="Use slot, which stays at one address.",
        )
