"""Beam search on the graphs of a bundle."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.engine.beam import BeamSearch, Hypothesis, run_search
from edgekv.engine.caches import CacheSetup
from edgekv.engine.events import Setup, StopReason
from edgekv.engine.graphs import Graphs
from edgekv.engine.mode import Always
from edgekv.engine.sequence import Sequence
from edgekv.errors import UsageError
from edgekv.kv.beam_cache import BeamCache
from edgekv.prefix import StoreStats
from edgekv.text.detokenizer import Detokenizer
from edgekv.text.params import BeamParams
from edgekv.text.processors import LogitsProcessor
from edgekv.text.tools import Tools
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
        decoded_tokens: positions run after the prompt; each one runs all beams in turn.
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


class GraphScorer:
    """Logits from a bundle's graphs: the prompt once, then the AR-1 graph once per beam and position.

    Attributes:
        beams: the cache of the beams; None until a beam runs, and for a search of one token.
        prefill_ns: time from the prompt to its last logits, ns.
        cache_ns: time spent gathering and keeping rows, ns.
    """

    def __init__(self, graphs: Graphs, sequence: Sequence, encoding: Encoding, beams: int, steps: int) -> None:
        """Prepare to score.

        Args:
            graphs: of the bundle.
            sequence: with the prompt, on the pool's own session.
            encoding: of the logits.
            beams: number of beams.
            steps: maximum number of positions run after the prompt.
        """
        self.beams: BeamCache | None = None
        self.prefill_ns = 0
        self.cache_ns = 0
        self._graphs = graphs
        self._sequence = sequence
        self._encoding = encoding
        self._count = beams
        self._steps = steps
        self._taken = 0

    def first(self) -> NDArray[Any]:
        started = perf_counter_ns()
        logits = self._encoding.dequantize(self._sequence.logits())
        self.prefill_ns = perf_counter_ns() - started
        return logits[None]

    def next(self, parents: abc.Sequence[int], tokens: abc.Sequence[int]) -> NDArray[Any]:
        if self.beams is None:
            self.beams = BeamCache(self._graphs.cache, self._count, kept=self._steps - 1)
        else:
            self.beams.reorder(parents)
        self._taken += 1
        graph = self._graphs.largest_decode()
        rows = []
        for beam, token in enumerate(tokens):
            started = perf_counter_ns()
            columns = self.beams.columns(beam)
            self.cache_ns += perf_counter_ns() - started
            graph.run((token,), self.beams.position, (self.beams.window,), columns)
            rows.append(self._encoding.dequantize(graph.logits[-1]))
            started = perf_counter_ns()
            if self._taken < self._steps:
                self.beams.keep(beam)
            self.cache_ns += perf_counter_ns() - started
        return np.stack(rows)


def check_beams(
    manifest: Manifest,
    caches: CacheSetup,
    sequence: int | None = None,
    processors: abc.Sequence[LogitsProcessor] = (),
    tools: Tools | None = None,
    *,
    return_logits: bool = False,
    speculates: bool = False,
) -> None:
    """Reject options that beam search does not support.

    Raises:
        UsageError: a sequence, processors, tools, logits, speculation, or a context policy, cache mode, growth, key
            layout or attention window without beam search.
    """

    def refuse(field: str, found: object, wanted: str, fix: str) -> NoReturn:
        raise UsageError(field, got=f"{found} with num_beams", expected=wanted, fix=fix)

    if sequence is not None:
        refuse("sequence", sequence, "none with num_beams", "Leave one of them out.")
    if processors:
        refuse("processors", len(processors), "none with num_beams", "Leave one of them out.")
    if tools is not None:
        refuse("tools", len(tools.tools), "none with num_beams", "Leave one of them out.")
    if return_logits:
        refuse("return_logits", True, "none with num_beams", "Use Model.score for the logits of a text.")
    if speculates:
        refuse("speculate", "drafts", "none with num_beams", "Leave one of them out.")
    if caches.policy.name != "fail":
        refuse("context policy", caches.policy.name, "fail", "Choose the policy fail, or leave num_beams out.")
    if not isinstance(caches.mode, Always):
        refuse("cache mode", caches.mode, "always", "Choose the mode always, or leave num_beams out.")
    if caches.growth is not None:
        refuse("growth", caches.growth.name, "none with num_beams", "Leave one of them out.")
    has_states = manifest.model.convolution is not None
    if manifest.key_layout != "rows" or manifest.windows or has_states:
        found = "layers with states, which beams cannot share" if has_states else "layers with an attention window"
        raise UsageError(
            "num_beams",
            got="keys as columns" if manifest.key_layout != "rows" else found,
            expected="keys as rows, and layers that all attend to the whole context",
            fix="Leave num_beams out, or export another bundle for it.",
        )


def run_beams(
    graphs: Graphs,
    sequence: Sequence,
    setup: Setup,
    params: BeamParams,
    manifest: Manifest,
    tokenizer: Tokenizer,
) -> BeamResult:
    """Run a beam search.

    Args:
        graphs: of the bundle.
        sequence: with the prompt, on the pool's own, empty session, which contains it afterwards.
        setup: for the statistics.
        params: how to search.
        manifest: of the bundle.
        tokenizer: of the bundle.

    Raises:
        UsageError: parameters that do not fit the vocabulary or the context.
        EngineError: the runtime failed.
    """
    # At most S tokens can be run; the logits of the last one give one more token.
    prompt = tuple(sequence.tokens)
    room = manifest.context + 1 - len(prompt)
    limit: StopReason = "length" if params.max_new_tokens <= room else "context"
    length = min(params.max_new_tokens, room)
    search = BeamSearch(params, eos=manifest.tokens.eos, max_new_tokens=length, vocab=manifest.model.vocab)
    sequence.prepare()
    sequence.begin()
    cache = graphs.cache
    times, copied = graphs.times, cache.stats.bytes_copied
    scorer = GraphScorer(graphs, sequence, manifest.encodings["logits"], params.num_beams, length - 1)
    started = perf_counter_ns()
    best = run_search(scorer, search)
    decode_ns = perf_counter_ns() - started - scorer.prefill_ns

    def result(found: Hypothesis) -> BeamSequence:
        ended = found.tokens[-1] in search.eos
        text = _text(tokenizer, prompt, found.tokens[: len(found.tokens) - ended])
        return BeamSequence(found.tokens, text, found.score, "eos" if ended else limit)

    sequence.finish()
    times = graphs.times - times
    held, taken = cache.stats, scorer.beams
    decoded = search.length - 1
    kept, gathered = (0, 0) if taken is None else (taken.bytes_kept, taken.bytes_gathered)
    stats = BeamStats(
        prompt_tokens=len(prompt),
        num_beams=params.num_beams,
        decoded_tokens=decoded,
        prefill_ms=scorer.prefill_ns / 1e6,
        decode_ms_per_token=decode_ns / 1e6 / decoded if decoded else None,
        steps=times.steps,
        host_us_per_step=(times.host_ns + scorer.cache_ns) / 1e3 / times.steps,
        setup=setup,
        kv_bytes_held=held.bytes_held if taken is None else taken.bytes_held,
        kv_bytes_beside=0 if taken is None else taken.spill_bytes,
        kv_bytes_copied=held.bytes_copied - copied + kept + gathered,
        kv_bytes_kept=kept,
        kv_bytes_gathered=gathered,
        restored_tokens=sequence.stats.cache.restored_tokens,
        prefix=sequence.prefix_stats,
    )
    return BeamResult(prompt, tuple(result(found) for found in best), stats)


def _text(tokenizer: Tokenizer, prompt: abc.Sequence[int], tokens: abc.Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
