"""A bundle on an engine, with a cache: what applications use."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle, Role, open_bundle
from edgekv.engine import EngineName, Runner, make_engine
from edgekv.errors import ContextFullError, UsageError
from edgekv.generate import Detokenizer, Generation, Sampler, Sampling, StopSequences
from edgekv.generate.loop import Setup
from edgekv.kv import DEFAULT_RESERVE, KVCache, parse_reserve

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
    policy: str = "fail",
    threads: int | None = None,
    verify: bool = True,
) -> Model:
    """Open a bundle and get it ready to run.

    Args:
        bundle: its folder, or what `open_bundle` gave.
        engine: `cpu` or `htp`.
        kv_update: `pointer-shift` or `slot`; None for the default, `slot` (`pointer-shift` if a reserve is given).
        reserve: memory of `pointer-shift`, in units of S-1 rows per tensor, above 1, at most 2; None for 2.
        policy: `fail` ends a generation when the context is full; `sliding-window` forgets the oldest tokens.
        threads: of the engine `cpu`; None leaves it to ONNX Runtime.
        verify: False skips the hashes of the bundle's files.

    Raises:
        BundleError: the bundle is incomplete, changed or of another format version.
        UsageError: an unknown name, or options that do not go together.
        EngineError: the engine is missing or refused a graph.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify)
    return Model(opened, engine, kv_update=kv_update, reserve=reserve, policy=policy, threads=threads)


class Model:
    """A bundle, an engine and the cache of one sequence; see `load`.

    Attributes:
        bundle: the bundle.
        engine: name of the engine.
        cache: the KV cache, as the last call left it.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: str = "cpu",
        *,
        kv_update: str | None = None,
        reserve: Fraction | float | str | None = None,
        policy: str = "fail",
        threads: int | None = None,
    ) -> None:
        manifest = bundle.manifest
        strategy = kv_update or (DEFAULT_KV_UPDATE if reserve is None else "pointer-shift")
        if reserve is not None and strategy != "pointer-shift":
            found, way_out = f"{reserve} with {strategy}", "Leave it out, or choose pointer-shift."
            raise UsageError("reserve", found=found, wanted="the update strategy pointer-shift", way_out=way_out)
        ratio = DEFAULT_RESERVE if reserve is None else parse_reserve(reserve)
        made = make_engine(engine, device=manifest.device, threads=threads)
        self.bundle = bundle
        self.engine: EngineName = made.name
        self.cache = KVCache(
            manifest.geometry, ar={g.ar for g in manifest.graphs}, strategy=strategy, reserve=ratio, policy=policy
        )
        self._setup = Setup(made.name, strategy, float(ratio) if strategy == "pointer-shift" else None)
        self._runner = Runner(bundle, made, self.cache)
        self._current: Generation | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self.bundle.tokenizer()

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text, with the special tokens that the checkpoint's tokenizer adds.

        Raises:
            UsageError: the text is not Unicode, as of an argument in another encoding.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "prompt", found=error, wanted="Unicode text", way_out="Give it as UTF-8, or in a file."
            ) from None
        tokens = list(self.tokenizer.encode(prompt).ids)
        bos = self.bundle.manifest.tokens.bos
        return tokens if tokens or bos is None else [bos]

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
    ) -> Generation:
        """Continue a prompt, from an empty cache.

        Args:
            prompt: text, or token ids.
            max_new_tokens: at most so many tokens are generated.
            temperature: 0 is greedy.
            top_k: only the k most likely tokens.
            top_p: only the most likely tokens whose probabilities reach p together.
            seed: of the random numbers; None draws one.
            stop: texts before which the generation ends.

        Returns:
            An iterator of `Token` with `.stats`. A later call of `generate` or `score` ends it.

        Raises:
            ContextFullError: the prompt is longer than the context and the policy is `fail`; nothing was run.
            UsageError: an option out of range, an empty prompt, or an id that is not in the vocabulary.
            EngineError: the engine refused a graph.
        """
        sampler = Sampler(
            Sampling(temperature, top_k, top_p, seed), self.bundle.manifest.encodings["logits"].encoding()
        )
        stops = StopSequences(stop)
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(tokens, "prompt")
        self._start("decode", *(("prefill",) if len(tokens) > 1 else ()))
        self._current = Generation(
            self._runner,
            tokens,
            self._setup,
            max_new_tokens=max_new_tokens,
            eos=self.bundle.manifest.tokens.eos,
            sampler=sampler,
            detokenizer=Detokenizer(self.tokenizer, tokens),
            stops=stops,
        )
        return self._current

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each of the tokens, `[T, V]`, teacher forced from an empty cache.

        Raises:
            ContextFullError: more tokens than the context holds and the policy is `fail`; nothing was run.
            UsageError: no tokens, or an id that is not in the vocabulary.
            EngineError: the engine refused a graph.
        """
        tokens = list(tokens)
        self._check(tokens, "tokens")
        self._start("score", "decode")
        return self.bundle.manifest.encodings["logits"].encoding().dequantize(self._runner.feed_all(tokens))

    def _start(self, *roles: Role) -> None:
        if self._current is not None:
            self._current.abandon()
        self._runner.prepare(*roles)
        self.cache.reset()

    def _check(self, tokens: Sequence[int], field: str) -> None:
        manifest = self.bundle.manifest
        if not tokens:
            raise UsageError(field, found="no tokens", wanted="at least one", way_out="Give some text.")
        if wrong := [t for t in tokens if not 0 <= t < manifest.model.vocab]:
            wanted = f"0 to {manifest.model.vocab - 1}, the model's vocabulary"
            raise UsageError(field, found=f"id {wrong[0]}", wanted=wanted, way_out="Use the bundle's own tokenizer.")
        if self.cache.policy == "fail" and len(tokens) > manifest.context:
            raise ContextFullError(
                field,
                found=f"{len(tokens)} tokens",
                wanted=f"at most {manifest.context}, the context of the bundle",
                way_out="Shorten it, choose the policy sliding-window, or export with a larger --context.",
            )
