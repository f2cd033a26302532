"""Speed of a bundle: prefill, decode, and the time to the first token with and without a cached prefix.

The tests have the names and lengths of those of llama-bench: `pp512` is a prompt of 512 random tokens, `tg128` 128
tokens one at a time, `@ d256` after 256 tokens that are not counted. All are calls of `Model.generate`: greedy, with
text, and with prefixes stored in memory. The first run of a test warms up and is not counted.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter_ns

import numpy as np

from edgekv.bench.plan import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, BenchPlan
from edgekv.bench.report import BenchReport, FirstToken, Speed, VerifyPass
from edgekv.draft import Speculation
from edgekv.engine import Generation
from edgekv.errors import UsageError
from edgekv.model import Model
from edgekv.text.params import SamplingParams

_VERIFY_PASSES = 8  # of each run
_SEQUENCE = 0  # has the depth of a test of prefill
_UNCACHED_PART = 8  # of a prompt whose prefix is cached, one part in eight is not


def default_plan(model: Model, plan: BenchPlan) -> BenchPlan:
    """A plan whose default lengths are no longer than the context."""
    room = _room(model)
    prompts = sorted({min(length, room) for length in DEFAULT_PROMPT_TOKENS})
    fitting = [min(length, max(room - max(1, *plan.depths), 1)) for length in DEFAULT_NEW_TOKENS]
    return BenchPlan(
        prompts if plan.prompt_tokens is DEFAULT_PROMPT_TOKENS else plan.prompt_tokens,
        fitting if plan.new_tokens is DEFAULT_NEW_TOKENS else plan.new_tokens,
        plan.depths,
        plan.repetitions,
        plan.seed,
    )


def run_bench(
    model: Model, plan: BenchPlan, threads: int | None = None, report: Callable[[Speed | FirstToken], None] = print
) -> BenchReport:
    """Measure a bundle.

    Args:
        model: with a prefix cache in memory; nobody else uses it.
        plan: what to measure.
        threads: as the model was loaded with, for the report.
        report: called with each result.

    Raises:
        UsageError: a length that the context has no room for; nothing was run.
        EngineError: the runtime failed.
    """
    room = _room(model)
    for depth in plan.depths:
        decoded_after = max(depth, 1)
        tests = (
            *((length, depth) for length in plan.prompt_tokens),
            *((length, decoded_after) for length in plan.new_tokens),
        )
        for length, before in tests:
            if before + length > room:
                got = f"{length} tokens after {before}" if before else f"{length} tokens"
                expected = f"at most {room}, the room in the context of the bundle"
                raise UsageError("length", got=got, expected=expected, fix="Use smaller ones.")
    random = np.random.default_rng(plan.seed)
    warm_up = _begin(model, _tokens(model, 1, random), 1)
    list(warm_up)
    speeds: list[Speed] = []
    for depth in plan.depths:
        for prompt, new in (
            *((length, 0) for length in plan.prompt_tokens),
            *((0, length) for length in plan.new_tokens),
        ):
            speeds.append(_speed(model, prompt, new, depth, plan.repetitions, random))
            report(speeds[-1])
    first: list[FirstToken] = []
    for length in plan.prompt_tokens:
        for cached in (0, length - max(length // _UNCACHED_PART, 1)):
            first.append(_first_token(model, length, cached, plan.repetitions, random))
            report(first[-1])
    verify: list[VerifyPass] = []
    for depth in plan.depths:
        for rows in model.verify_rows:
            if (passes := min(_VERIFY_PASSES, room - max(depth, 1) - rows)) > 0:
                measured = _verify_pass(model, rows, depth, passes, plan.repetitions, random)
                verify += [] if measured is None else [measured]
    manifest = model.bundle.manifest
    return BenchReport(
        bundle=str(model.bundle.path),
        recipe=manifest.recipe.name,
        context=manifest.context,
        ar=sorted({graph.ar for graph in manifest.graphs if graph.role in ("prefill", "decode")}),
        engine=model.engine.name,
        kv_update=warm_up.stats.setup.kv_update,
        threads=threads,
        processor=_processor(),
        processor_count=os.cpu_count(),
        speeds=speeds,
        first_tokens=first,
        verify_passes=verify,
    )


def _speed(model: Model, prompt: int, new: int, depth: int, repetitions: int, random: np.random.Generator) -> Speed:
    samples = list[int]()
    for _ in range(1 + repetitions):
        tokens = _tokens(model, depth + prompt or 1, random)
        sequence = _SEQUENCE if prompt and depth else None
        if sequence is not None:
            list(_begin(model, tokens[:depth], 1, sequence=sequence))
        with _begin(model, tokens, 1 + new, sequence=sequence) as generation:
            if new:
                next(generation)
            began = perf_counter_ns()
            for _ in generation:
                pass
            samples.append(perf_counter_ns() - began)
    model.sequences.drop(_SEQUENCE)
    counted = samples[1:]
    rates = [(prompt + new) * 1e9 / sample for sample in counted]
    test = (f"pp{prompt}" if prompt else f"tg{new}") + (f" @ d{depth}" if depth else "")
    return Speed(
        test, prompt, new, depth, fmean(counted), _deviation(counted), fmean(rates), _deviation(rates), counted
    )


@dataclass(frozen=True, slots=True)
class _RandomDrafts:
    """Fills passes with drafts, hardly any of which are right."""

    vocab: int
    random: np.random.Generator
    name: str = "random"

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        drawn: list[int] = self.random.integers(self.vocab, size=k).tolist()
        return drawn

    def accepted(self, n: int) -> None:
        """Nothing to learn."""


def _verify_pass(
    model: Model, rows: int, depth: int, count: int, repetitions: int, random: np.random.Generator
) -> VerifyPass | None:
    """Answers with drafts and without in turns, of `count` tokens after the first; None if no pass had drafts."""
    drafts = Speculation(tokens=rows - 1, drafter=_RandomDrafts(model.bundle.manifest.model.vocab, random))
    passes, steps, proposed = list[float](), list[float](), 0
    for _ in range(1 + repetitions):
        for samples, speculation in ((passes, drafts), (steps, None)):
            prompt = _tokens(model, max(depth, 1), random)
            with _begin(model, prompt, 1 + count + rows, speculation) as generation:
                next(generation)
                began = perf_counter_ns()
                for _ in islice(generation, count):
                    pass
                spent, done = perf_counter_ns() - began, generation.stats.speculation
            samples.append(spent / (count if done is None else done.passes))
            proposed += 0 if done is None else done.proposed
    if not proposed:
        return None
    counted = passes[1:]
    return VerifyPass(rows, depth, fmean(counted), _deviation(counted), fmean(counted) / fmean(steps[1:]), counted)


def _first_token(model: Model, length: int, cached: int, repetitions: int, random: np.random.Generator) -> FirstToken:
    samples, restored = list[float](), 0
    for number in range(1 + repetitions):
        tokens, salt = _tokens(model, length, random), f"{length} {cached} {number}"
        if cached:
            list(_begin(model, tokens[:cached], 1, salt=salt))
        generation = _begin(model, tokens, 1, salt=salt)
        began = perf_counter_ns()
        next(generation)
        samples.append((perf_counter_ns() - began) / 1e6)
        restored = generation.stats.cache.restored_tokens
    counted = samples[1:]
    return FirstToken(length, restored, fmean(counted), _deviation(counted), counted)


def _tokens(model: Model, count: int, random: np.random.Generator) -> list[int]:
    drawn: list[int] = random.integers(model.bundle.manifest.model.vocab, size=count).tolist()
    return drawn


def _begin(
    model: Model,
    tokens: Sequence[int],
    new: int,
    speculation: Speculation | None = None,
    *,
    salt: str | None = None,
    sequence: int | None = None,
) -> Generation:
    """A greedy call that only its length ends."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return model.generate(tokens, params, speculate=speculation, cache_salt=salt, sequence=sequence)


def _room(model: Model) -> int:
    """Tokens that an empty cache has room for."""
    manifest = model.bundle.manifest
    return manifest.context - (0 if manifest.sink is None else len(manifest.sink.tokens))


def _deviation(samples: Sequence[float]) -> float:
    return stdev(samples) if len(samples) > 1 else 0.0


def _processor() -> str:
    """The name of the processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(names, platform.processor() or platform.machine())
