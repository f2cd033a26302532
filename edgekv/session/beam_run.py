"""Beam search on the graphs of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv.beam_cache import BeamCache
from edgekv.prefix import StoreStats
from edgekv.runtime.runner import Runner
from edgekv.session.beam import BeamSearch, Hypothesis, run_search
from edgekv.session.events import StopReason
from edgekv.session.feeder import SequenceFeeder
from edgekv.session.loop import Setup
from edgekv.session.text import Detokenizer
from quant import Encoding

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One of the sequences found.

    Attributes:
        tokens: the new ones, the end-of-sequence token included.
        text: of the tokens, without the end-of-sequence token.
        score: sum of their log-probabilities, divided by their number to the power of the length penalty.
        stop_reason: `eos`; `length`, max_new_tokens reached; `context`, the context is full.
    """

    tokens: tuple[int, ...]
    text: str
    score: float
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class BeamStats:
    """What a beam search did.

    Attributes:
        prompt_tokens: tokens of the prompt.
        num_beams: sequences that were continued side by side.
        decoded_tokens: positions behind the prompt that were run, each by all beams, one after the other.
        prefill_ms: time from the prompt to its logits.
        decode_ms_per_token: mean time of one position of all beams; None if none was decoded.
        steps: inferences of prefill and decode.
        host_us_per_step: mean time of a step outside of the runtime's own run: inputs, bindings, copies.
        engine: where the graphs ran.
        kv_update: update strategy of the cache.
        reserve: memory of `pointer-shift` in units of S-1 rows; None for other strategies.
        kv_bytes_held: bytes allocated for the keys and values of prompt and beams.
        kv_bytes_beside: of these, the bytes beside the cache of one sequence; 0 if all beams fit into its window.
        kv_bytes_copied: bytes copied in all: of the prompt by the cache, and those that follow.
        kv_bytes_kept: one row of all tensors for each beam and position, copied to where it stays.
        kv_bytes_gathered: rows exchanged because the window cannot hold those of all beams. Reordering copies none.
        restored_tokens: tokens of the prompt that were copied from the store of prefixes.
        prefix: what the search did with that store, and what it holds now; None without one.
    """

    prompt_tokens: int
    num_beams: int
    decoded_tokens: int
    prefill_ms: float
    decode_ms_per_token: float | None
    steps: int
    host_us_per_step: float
    engine: str
    kv_update: str
    reserve: float | None
    kv_bytes_held: int
    kv_bytes_beside: int
    kv_bytes_copied: int
    kv_bytes_kept: int
    kv_bytes_gathered: int
    restored_tokens: int
    prefix: StoreStats | None


@dataclass(frozen=True, slots=True)
class BeamResult:
    """What a beam search found.

    Attributes:
        prompt: its tokens.
        sequences: best first.
        stats: what it took.
    """

    prompt: tuple[int, ...]
    sequences: tuple[BeamSequence, ...]
    stats: BeamStats


class RunnerScorer:
    """Logits from a bundle's graphs: the prompt once, then the AR-1 graph once for each beam and position.

    Attributes:
        beams: the cache of the beams; None until a beam runs, and for a search of one token.
        prefill_ns: time from the prompt to its logits, ns.
        cache_ns: time that it took to gather and keep rows, ns.
    """

    def __init__(
        self,
        runner: Runner,
        feeder: SequenceFeeder,
        prompt: Sequence[int],
        encoding: Encoding,
        beams: int,
        steps: int,
    ) -> None:
        """Prepare to score; the runner's cache must be empty.

        Args:
            runner: of the bundle.
            feeder: runs the prompt on the runner's cache.
            prompt: token ids.
            encoding: of the logits.
            beams: how many are run side by side.
            steps: the most positions behind the prompt that are run.
        """
        self.beams: BeamCache | None = None
        self.prefill_ns = 0
        self.cache_ns = 0
        self._runner = runner
        self._feeder = feeder
        self._prompt = prompt
        self._encoding = encoding
        self._count = beams
        self._steps = steps
        self._taken = 0

    def first(self) -> NDArray[Any]:
        started = perf_counter_ns()
        logits = self._encoding.dequantize(self._feeder.feed(self._prompt))
        self.prefill_ns = perf_counter_ns() - started
        return logits[None]

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> NDArray[Any]:
        if self.beams is None:
            self.beams = BeamCache(self._runner.cache, self._count, kept=self._steps - 1)
        else:
            self.beams.reorder(parents)
        self._taken += 1
        rows = []
        for beam, token in enumerate(tokens):
            started = perf_counter_ns()
            columns = self.beams.columns(beam)
            self.cache_ns += perf_counter_ns() - started
            logits = self._runner.run(token, self.beams.position, self.beams.window, columns)
            rows.append(self._encoding.dequantize(logits))
            started = perf_counter_ns()
            if self._taken < self._steps:
                self.beams.keep(beam)
            self.cache_ns += perf_counter_ns() - started
        return np.stack(rows)


def run_beams(
    runner: Runner,
    feeder: SequenceFeeder,
    prompt: Sequence[int],
    setup: Setup,
    search: BeamSearch,
    *,
    limit: StopReason,
    encoding: Encoding,
    tokenizer: Tokenizer,
) -> BeamResult:
    """Search to the end.

    Args:
        runner: of the bundle; its cache is empty, and holds the prompt afterwards.
        feeder: runs the prompt on that cache.
        prompt: token ids.
        setup: for the statistics.
        search: at its begin; the context has room for all its tokens but the last.
        limit: why a sequence of the greatest length ended.
        encoding: of the logits.
        tokenizer: of the bundle.

    Raises:
        EngineError: the runtime failed.
    """
    times, copied = runner.times, runner.cache.stats.bytes_copied
    beams = search.options.num_beams
    scorer = RunnerScorer(runner, feeder, prompt, encoding, beams, search.max_new_tokens - 1)
    started = perf_counter_ns()
    best = run_search(scorer, search)
    decode_ns = perf_counter_ns() - started - scorer.prefill_ns
    feeder.finish()

    def sequence(found: Hypothesis) -> BeamSequence:
        ended = found.tokens[-1] in search.eos
        text = _decode(tokenizer, prompt, found.tokens[: len(found.tokens) - ended])
        return BeamSequence(found.tokens, text, found.score, "eos" if ended else limit)

    times = runner.times - times
    cache, taken = runner.cache.stats, scorer.beams
    decoded = search.length - 1
    kept, gathered = (0, 0) if taken is None else (taken.bytes_kept, taken.bytes_gathered)
    stats = BeamStats(
        prompt_tokens=len(prompt),
        num_beams=beams,
        decoded_tokens=decoded,
        prefill_ms=scorer.prefill_ns / 1e6,
        decode_ms_per_token=decode_ns / 1e6 / decoded if decoded else None,
        steps=times.steps,
        host_us_per_step=(times.host_ns + scorer.cache_ns) / 1e3 / times.steps,
        engine=setup.engine,
        kv_update=setup.kv_update,
        reserve=setup.reserve,
        kv_bytes_held=cache.bytes_held if taken is None else taken.bytes_held,
        kv_bytes_beside=0 if taken is None else taken.spill_bytes,
        kv_bytes_copied=cache.bytes_copied - copied + kept + gathered,
        kv_bytes_kept=kept,
        kv_bytes_gathered=gathered,
        restored_tokens=feeder.done.restored_tokens,
        prefix=feeder.prefix_stats,
    )
    return BeamResult(tuple(prompt), tuple(sequence(found) for found in best), stats)


def _decode(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
