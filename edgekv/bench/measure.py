"""Speed of a bundle: prefill, decode, and the time to the first token with and without a cached prefix.

The tests are those of llama-bench: `pp512` runs 512 random tokens through an empty cache, `tg128` runs 128 random
tokens one at a time, `@ d256` after 256 tokens that are not counted. Nothing is sampled or turned into text. The first
run of a test warms up and is not counted.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter_ns

import numpy as np

from edgekv.bench.plan import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT_TOKENS, BenchPlan
from edgekv.bench.report import BenchReport, FirstToken, Speed, VerifyPass
from edgekv.engine import Session
from edgekv.errors import UsageError
from edgekv.model import Model

_VERIFY_PASSES = 8  # of each run
_UNCACHED_PART = 8  # of a prompt whose prefix is cached, one part in eight is not


def default_plan(model: Model, plan: BenchPlan) -> BenchPlan:
    """A plan whose default lengths are no longer than the context."""
    room = _room(model)
    prompts = sorted({min(length, room) for length in DEFAULT_PROMPT_TOKENS})
    fitting = [min(length, max(room - max(plan.depths, default=0), 1)) for length in DEFAULT_NEW_TOKENS]
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
        for length in (*plan.prompt_tokens, *plan.new_tokens):
            if depth + length > room:
                found = f"{length} tokens after {depth}" if depth else f"{length} tokens"
                wanted = f"at most {room}, the room in the context of the bundle"
                raise UsageError("length", got=found, expected=wanted, fix="Use smaller ones.")
    random = np.random.default_rng(plan.seed)
    warm_up = model.generate(_tokens(model, 1, random), 1, temperature=0)
    list(warm_up)
    speeds: list[Speed] = []
    for depth in plan.depths:
        for prompt, new in (*((each, 0) for each in plan.prompt_tokens), *((0, each) for each in plan.new_tokens)):
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
            if depth + rows + 2 * (1 + plan.repetitions) <= room:
                verify.append(_verify_pass(model, rows, depth, plan.repetitions, random))
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
    session, samples = model.session, list[int]()
    for _ in range(1 + repetitions):
        session.reset()
        if depth:
            session.feed(_tokens(model, depth, random))
        tokens = _tokens(model, prompt + new, random)
        began = perf_counter_ns()
        if prompt:
            session.feed(tokens)
        else:
            for token in tokens:
                session.feed([token])
        samples.append(perf_counter_ns() - began)
    session.reset()
    counted = samples[1:]
    rates = [(prompt + new) * 1e9 / sample for sample in counted]
    test = (f"pp{prompt}" if prompt else f"tg{new}") + (f" @ d{depth}" if depth else "")
    return Speed(
        test, prompt, new, depth, fmean(counted), _deviation(counted), fmean(rates), _deviation(rates), counted
    )


def _verify_pass(model: Model, rows: int, depth: int, repetitions: int, random: np.random.Generator) -> VerifyPass:
    """Passes and single steps in turns, each of which adds one token."""
    session, passes, steps = model.session, list[float](), list[float]()
    session.reset()
    session.feed(_tokens(model, max(depth, 1), random))
    count = min(_VERIFY_PASSES, (_room_left(session) - rows) // (2 * (1 + repetitions)))
    for _ in range(1 + repetitions):
        for samples, more in ((passes, rows - 1), (steps, 0)):
            began = perf_counter_ns()
            for _ in range(count):
                if more:
                    session.verify(_tokens(model, 1, random), _tokens(model, more, random))
                    session.settle()
                else:
                    session.feed(_tokens(model, 1, random))
            samples.append((perf_counter_ns() - began) / count)
    session.reset()
    counted = passes[1:]
    return VerifyPass(rows, depth, fmean(counted), _deviation(counted), fmean(counted) / fmean(steps[1:]), counted)


def _first_token(model: Model, length: int, cached: int, repetitions: int, random: np.random.Generator) -> FirstToken:
    samples, found = list[float](), 0
    for number in range(1 + repetitions):
        tokens, salt = _tokens(model, length, random), f"{length} {cached} {number}"
        if cached:
            list(model.generate(tokens[:cached], 1, temperature=0, cache_salt=salt))
        generation = model.generate(tokens, 1, temperature=0, cache_salt=salt)
        began = perf_counter_ns()
        next(generation)
        samples.append((perf_counter_ns() - began) / 1e6)
        found = generation.stats.cache.restored_tokens
    counted = samples[1:]
    return FirstToken(length, found, fmean(counted), _deviation(counted), counted)


def _tokens(model: Model, count: int, random: np.random.Generator) -> list[int]:
    drawn: list[int] = random.integers(model.bundle.manifest.model.vocab, size=count).tolist()
    return drawn


def _room(model: Model) -> int:
    """Tokens that an empty cache has room for."""
    model.session.reset()
    return _room_left(model.session)


def _room_left(session: Session) -> int:
    room = session.cache.room_tokens
    assert room is not None  # of the policy `fail`
    return room


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
