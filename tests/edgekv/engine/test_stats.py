"""Statistics of generations: times that add up to those that passed, and counts."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest

import edgekv

PROMPT, TOKENS = [5, 6, 7, 8, 9], 6


def test_times_of_a_generation_are_within_those_that_passed(small_export: Path) -> None:
    with edgekv.load(small_export) as model:
        started = perf_counter()
        generation = model.generate(PROMPT, TOKENS, ignore_eos=True)
        before = generation.stats.times
        assert before.first_token_ms is before.decode_ms_per_token is before.tokens_per_second is None
        assert len([*generation]) == TOKENS
        stats, passed_ms = generation.stats, 1000 * (perf_counter() - started)
    times = stats.times
    assert (stats.prompt_tokens, stats.generated_tokens, stats.forced_tokens) == (len(PROMPT), TOKENS, 0)
    assert times.steps > times.decode_steps == TOKENS - 1
    assert times.decode_ms_per_token is not None and times.first_token_ms is not None
    assert 0 < times.first_token_ms < passed_ms
    assert 0 < times.prefill_ms + (TOKENS - 1) * times.decode_ms_per_token < passed_ms
    assert 0 < times.steps * times.host_us_per_step < 1000 * passed_ms
    assert times.tokens_per_second == pytest.approx(1000 / times.decode_ms_per_token, rel=1e-9)


def test_times_of_a_beam_search_are_within_those_that_passed(small_export: Path) -> None:
    with edgekv.load(small_export) as model:
        started = perf_counter()
        stats = model.generate(PROMPT, TOKENS, num_beams=2).stats
        passed_ms = 1000 * (perf_counter() - started)
    assert (stats.prompt_tokens, stats.num_beams, stats.decoded_tokens) == (len(PROMPT), 2, TOKENS - 1)
    assert stats.decode_ms_per_token is not None
    assert 0 < stats.prefill_ms + (TOKENS - 1) * stats.decode_ms_per_token < passed_ms
    assert 0 < stats.steps * stats.host_us_per_step < 1000 * passed_ms
