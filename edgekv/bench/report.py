"""What `edgekv bench` has measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of one test, with the field names of llama-bench.

    Attributes:
        test: its name.
        n_prompt: tokens of the prompt that are counted, to the first token of the answer.
        n_gen: tokens after the first.
        n_depth: tokens of the prompt before.
        avg_ns: mean time of a run.
        stddev_ns: standard deviation of it; 0 of a single run.
        avg_ts: mean tokens per second.
        stddev_ts: standard deviation of them.
        samples_ns: time of each run.
    """

    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """Time of a pass that checks drafts.

    Attributes:
        n_rows: AR of its graph: one token and drafts.
        n_depth: tokens in the cache before.
        avg_ns: mean time of a pass.
        stddev_ns: standard deviation of it; 0 of a single run.
        steps: decoded tokens without drafts that take as long: drafts pay if a pass brings more tokens.
        samples_ns: mean time of a pass in each run.
    """

    n_rows: int
    n_depth: int
    avg_ns: float
    stddev_ns: float
    steps: float
    samples_ns: list[float]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to the first token of a prompt.

    Attributes:
        n_prompt: tokens of the prompt.
        n_cached: the part of them that the prefix cache had.
        avg_ms: mean.
        stddev_ms: standard deviation; 0 of a single run.
        samples_ms: each run.
    """

    n_prompt: int
    n_cached: int
    avg_ms: float
    stddev_ms: float
    samples_ms: list[float]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All results, and what they were measured on.

    Attributes:
        bundle: its folder.
        recipe: how its weights were quantized.
        context: S of its largest graphs.
        ar: tokens per inference of its prefill graphs.
        engine: that ran the graphs.
        kv_update: update strategy of the cache.
        threads: of one operation; None leaves them to the runtime.
        processor: name of the processor.
        processor_count: its threads.
        speeds: of prefill and decode.
        first_tokens: times to the first token.
        verify_passes: of the bundle's verify graphs.
    """

    bundle: str
    recipe: str
    context: int
    ar: list[int]
    engine: str
    kv_update: str
    threads: int | None
    processor: str
    processor_count: int | None
    speeds: list[Speed]
    first_tokens: list[FirstToken]
    verify_passes: list[VerifyPass]
