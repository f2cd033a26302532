"""Beam search on the graphs of a bundle, a position of all beams at a time."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.engine.adapters import BoundAdapter
from edgekv.engine.beam_search import BeamSearch, Hypothesis
from edgekv.engine.caches import CacheSetup
from edgekv.engine.request import DEFAULT_CACHE, Request, pieces
from edgekv.engine.rows import SequenceRows
from edgekv.engine.session import CacheUse, Graphs
from edgekv.engine.stats import Setup
from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.prefix import StoreStats
from edgekv.runtime import StepTimes
from edgekv.text.output import Detokenizer, StopReason
from edgekv.text.params import BeamParams
from quant import Encoding

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One sequence of the result.

    Attributes:
        tokens: the new tokens, including the end-of-sequence token.
        text: the decoded tokens, without the end-of-sequence token.
        score: sum of the tokens' log-probabilities, divided by n**length_penalty for n tokens.
        stop_reason: `eos`; `length`, max_new_tokens reached; `context`, the context is full.
    """

    tokens: tuple[int, ...]
    text: str
    score: float
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class BeamStats:
    """Statistics of a beam search.

    Attributes:
        prompt_tokens: tokens of the prompt.
        num_beams: number of beams.
        decoded_tokens: positions run after the prompt; each one runs all beams.
        prefill_ms: time from the prompt to its last logits.
        decode_ms_per_token: mean time of one position of all beams; None if none was decoded.
        steps: inferences of prefill and decode.
        host_us_per_step: mean time of a step outside the runtime: inputs, bindings, copies.
        setup: engine and cache options.
        kv_bytes_held: bytes allocated for the keys and values of prompt and beams.
        kv_bytes_beside: the part of them in addition to one sequence's cache; 0 if all beams fit into its window.
        kv_bytes_copied: bytes copied in total: the prompt's by the cache, plus the next two fields.
        kv_bytes_kept: bytes copied to keep new rows: one row of all tensors per beam and position.
        kv_bytes_gathered: bytes of rows swapped because the window cannot hold all beams. Reordering copies none.
        restored_tokens: prompt tokens that were copied from the prefix cache.
        prefix: statistics of the prefix cache; None without one.
    """

    prompt_tokens: int
    num_beams: int
    decoded_tokens: int
    prefill_ms: float
    decode_ms_per_token: float | None
    steps: int
    host_us_per_step: float
    setup: Setup
    kv_bytes_held: int
    kv_bytes_beside: int
    kv_bytes_copied: int
    kv_bytes_kept: int
    kv_bytes_gathered: int
    restored_tokens: int
    prefix: StoreStats | None


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The result of a beam search.

    Attributes:
        prompt: its tokens.
        sequences: best first.
        stats: its statistics.
    """

    prompt: tuple[int, ...]
    sequences: tuple[BeamSequence, ...]
    stats: BeamStats


class BeamRun:
    """A beam search in steps: the logits of the prompt, then a row for each beam and position.

    Each beam is a fork of the prompt's sequence.

    Attributes:
        search: what it has found; done at the end.
    """

    def __init__(self, request: Request, params: BeamParams, graphs: Graphs, manifest: Manifest) -> None:
        """Begin with no position.

        Args:
            request: with the prompt.
            params: how to search.
            graphs: of the bundle.
            manifest: of the bundle.

        Raises:
            UsageError: parameters that do not fit the vocabulary or the context.
        """
        # At most S tokens can be run; the logits of the last one give one more token.
        room = manifest.context + 1 - len(request.tokens)
        self._limit: StopReason = "length" if params.max_new_tokens <= room else "context"
        length = min(params.max_new_tokens, room)
        self.search = BeamSearch(params, eos=manifest.tokens.eos, max_new_tokens=length, vocab=manifest.model.vocab)
        self._request = request
        self._graphs = graphs
        self._encoding: Encoding = manifest.encodings["logits"]
        self._steps = length - 1
        self._taken = 0
        self._rows: SequenceRows | None = None
        self._prefill_ns = self._decode_ns = 0
        self._times = StepTimes()

    @property
    def has_prompt(self) -> bool:
        """Whether the logits of the prompt are known."""
        return self.search.length > 0

    def begin(self, logits: NDArray[Any], ns: int) -> None:
        """Take the logits of the prompt, integers `[V]`, which took so long."""
        self._prefill_ns = ns
        self.search.advance(self._encoding.dequantize(logits)[None])

    def step(self, cache: KVCache, adapter: BoundAdapter | None) -> None:
        """Run the next position of all beams.

        Args:
            cache: holds the prompt.
            adapter: to compute with; None for the base model.

        Raises:
            EngineError: the runtime failed.
        """
        started, times, search = perf_counter_ns(), self._graphs.times, self.search
        if self._rows is None:
            self._rows = _forkable(self._graphs, cache, search.params.num_beams * (self._steps - 1))
        self._rows.shared.fork(dict(enumerate(search.parents)))
        self._taken += 1
        logits = []
        for beams in pieces(range(search.params.num_beams), self._rows.most):
            rows = self._rows.run(beams, [search.tokens[beam] for beam in beams], adapter)
            logits.append(self._encoding.dequantize(rows))
            if self._taken < self._steps:  # nothing follows the last ones
                for at, beam in enumerate(beams):
                    self._rows.keep(at, beam)
        search.advance(np.concatenate(logits))
        self._times += self._graphs.times - times
        self._decode_ns += perf_counter_ns() - started

    def result(
        self,
        cache: KVCache,
        use: CacheUse,
        times: StepTimes,
        setup: Setup,
        prefix: StoreStats | None,
        tokenizer: Tokenizer,
    ) -> BeamResult:
        """What it has found, at its end.

        Args:
            cache: that holds the prompt.
            use: of the cache by the prompt.
            times: of the prompt.
            setup: for the statistics.
            prefix: statistics of the prefix cache; None without one.
            tokenizer: of the bundle.
        """
        prompt, search, held = self._request.tokens, self.search, cache.stats
        beams = None if self._rows is None else self._rows.shared
        decoded = search.length - 1
        kept, gathered = (0, 0) if beams is None else (beams.bytes_kept, beams.bytes_gathered)
        times += self._times
        stats = BeamStats(
            prompt_tokens=len(prompt),
            num_beams=search.params.num_beams,
            decoded_tokens=decoded,
            prefill_ms=self._prefill_ns / 1e6,
            decode_ms_per_token=self._decode_ns / 1e6 / decoded if decoded else None,
            steps=times.steps,
            host_us_per_step=times.host_ns / 1e3 / max(times.steps, 1),
            setup=setup,
            kv_bytes_held=held.bytes_held if beams is None else beams.bytes_held,
            kv_bytes_beside=0 if beams is None else beams.spill_bytes,
            kv_bytes_copied=use.bytes_copied + kept + gathered,
            kv_bytes_kept=kept,
            kv_bytes_gathered=gathered,
            restored_tokens=use.restored_tokens,
            prefix=prefix,
        )
        return BeamResult(prompt, tuple(self._sequence(hypothesis, tokenizer) for hypothesis in search.best), stats)

    def _sequence(self, hypothesis: Hypothesis, tokenizer: Tokenizer) -> BeamSequence:
        tokens = hypothesis.tokens
        ended = tokens[-1] in self.search.eos
        detokenizer = Detokenizer(tokenizer, self._request.tokens)
        pushed = [detokenizer.push(token) for token in tokens[: len(tokens) - ended]]
        text = "".join(pushed) + detokenizer.flush()
        return BeamSequence(tokens, text, hypothesis.score, "eos" if ended else self._limit)


def _forkable(graphs: Graphs, cache: KVCache, kept: int) -> SequenceRows:
    """The prompt in a cache as sequence 0, which beams fork: rows of one pass where the window has room for all.

    Args:
        graphs: of the bundle.
        cache: holds the prompt.
        kept: rows of all beams beside it.

    Raises:
        ContextFullError: the cache has no room.
    """
    graph = graphs.largest_decode()
    # Elsewhere a row has other bits beside others than alone.
    if graphs.batch_invariance == "equal" and graphs.has_verify:
        verify = graphs.largest_verify()
        if cache.length + kept <= cache.geometry.context - verify.ar:
            graph = verify
    rows = SequenceRows(graphs, graph, cache, rows=kept)
    rows.shared.adopt(0)
    return rows


def check_beams(manifest: Manifest, caches: CacheSetup, request: Request) -> None:
    """Reject what beam search does not support.

    Raises:
        UsageError: a cache of its own, processors, tools, logits, speculation, or a context policy, cache mode, growth,
            key layout or attention window without beam search.
    """

    def refuse(field: str, got: object, expected: str, fix: str) -> NoReturn:
        raise UsageError(field, got=f"{got} with num_beams", expected=expected, fix=fix)

    if request.cache != DEFAULT_CACHE:
        refuse("sequence", request.cache, "none with num_beams", "Leave one of them out.")
    if request.processors:
        refuse("processors", len(request.processors), "none with num_beams", "Leave one of them out.")
    if request.tools is not None:
        refuse("tools", len(request.tools.tools), "none with num_beams", "Leave one of them out.")
    if request.returns_logits:
        refuse("return_logits", True, "none with num_beams", "Use Model.score for the logits of a text.")
    if request.speculation is not None:
        refuse("speculate", "drafts", "none with num_beams", "Leave one of them out.")
    if caches.policy.name != "fail":
        refuse("context policy", caches.policy.name, "fail", "Choose the policy fail, or leave num_beams out.")
    if caches.mode.name != "always":
        refuse("cache mode", caches.mode, "always", "Choose the mode always, or leave num_beams out.")
    if (growth := caches.allocation.growth) is not None:
        refuse("growth", growth.name, "none with num_beams", "Leave one of them out.")
    has_states = manifest.model.has_states
    if manifest.windows or has_states:
        got = "layers with states, which beams cannot share" if has_states else "layers with an attention window"
        raise UsageError(
            "num_beams",
            got=got,
            expected="layers that all attend to the whole context",
            fix="Leave num_beams out, or export another bundle for it.",
        )
