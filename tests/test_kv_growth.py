from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import ContextFullError
from edgekv.kv import Geometry
from edgekv.kv.context_ladder import ContextLadder
from edgekv.kv.growing_arena import GrowingArena
from edgekv.kv.growth import Growth, GrowthReport, Steps, report_growth

LAYERS = 32
ROW_BYTES = (2048,) * LAYERS


def _grown_at(growth: Growth, layer: int, tokens: int) -> set[int]:
    return {t for t in range(1, tokens) if growth.rows(layer, t) != growth.rows(layer, t - 1)}


def _naive(growth: Growth, tokens: int, known_tokens: int) -> int:
    """The peak in rows, of a list of buffers that a loop really holds."""
    held = [growth.rows(layer, known_tokens) for layer in range(growth.layers)]
    peak = sum(held)
    for t in range(known_tokens + 1, tokens + 1):
        new = [growth.rows(layer, t) for layer in range(growth.layers)]
        peak = max(peak, sum(new) + sum(old for old, grown in zip(held, new, strict=True) if old != grown))
        held = new
    return peak


@given(st.integers(32, 300), st.integers(0, 200), st.integers(1, 700))
@settings(max_examples=40)
def test_the_staggered_excess_is_at_most_an_eighth_of_the_synchronous_one(step: int, prompt: int, more: int) -> None:
    """From the first token on at which equal steps grow at all."""
    tokens = prompt + step + more
    staggered = report_growth(Steps.staggered(LAYERS, step, prompt), ROW_BYTES, tokens, known_tokens=prompt)
    equal = report_growth(Steps.equal(LAYERS, step, prompt), ROW_BYTES, tokens, known_tokens=prompt)
    assert 0 < 8 * staggered.excess_bytes <= equal.excess_bytes
    assert staggered.peak_bytes < equal.peak_bytes
    assert (staggered.most_layers, equal.most_layers) == (1, LAYERS)


def test_the_figures_of_a_generation_of_2048_tokens() -> None:
    """The old buffers of one layer in the way, or those of all 32."""
    staggered = report_growth(Steps.staggered(LAYERS), ROW_BYTES, 2048)
    equal = report_growth(Steps.equal(LAYERS), ROW_BYTES, 2048)
    assert staggered == GrowthReport(
        peak_bytes=142_467_072,
        peak_tokens=2045,
        steady_bytes=138_280_960,
        excess_bytes=2044 * 2048,
        grown=511,
        most_layers=1,
        copied_bytes=1_071_644_672,
    )
    assert (equal.peak_bytes, equal.excess_bytes) == (260_046_848, LAYERS * 15 * 128 * 2048)


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 100))
def test_staggered_layers_never_grow_together(layers: int, more: int, prompt: int) -> None:
    steps = Steps.staggered(layers, layers + more, prompt)
    assert steps.never_together
    grown = [_grown_at(steps, layer, 600) for layer in range(layers)]
    assert len(set().union(*grown)) == sum(map(len, grown))


def test_steps_that_differ_throughout_meet_in_the_end() -> None:
    drifting = Steps.drifting(LAYERS)
    assert not drifting.never_together
    assert 780 + 1 in _grown_at(drifting, 2, 800) & _grown_at(drifting, 28, 800)  # 6 x 130 = 5 x 156


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=2, max_size=4))
def test_never_together_is_what_a_long_generation_shows(sizes: list[tuple[int, int]]) -> None:
    steps = Steps(tuple(first for first, _ in sizes), tuple(step for _, step in sizes))
    grown = [_grown_at(steps, layer, 400) for layer in range(len(sizes))]
    assert steps.never_together == (len(set().union(*grown)) == sum(map(len, grown)))


@given(st.sampled_from(["equal", "staggered", "drifting"]), st.integers(1, 6), st.integers(0, 20), st.integers(0, 90))
def test_the_report_is_what_a_naive_loop_holds(kind: str, layers: int, prompt: int, more: int) -> None:
    growth = getattr(Steps, kind)(layers, 8, prompt)
    report = report_growth(growth, (1,) * layers, prompt + more, known_tokens=prompt)
    assert report.peak_bytes == _naive(growth, prompt + more, prompt)
    assert report.steady_bytes == sum(growth.rows(layer, prompt + more) for layer in range(layers))


GROWTHS = st.one_of(
    st.builds(Steps.equal, st.just(3), st.integers(1, 9), st.just(5)),
    st.builds(Steps.staggered, st.just(3), st.integers(3, 9), st.just(5)),
    st.builds(ContextLadder, st.just((8, 16, 40)), st.just(3), st.sampled_from([None, 0, 1, 2])),
)


@given(GROWTHS, st.integers(5, 39))
def test_an_arena_holds_what_the_report_says_and_keeps_every_row(growth: Growth, tokens: int) -> None:
    geometry = Geometry(3, 2, 4, 64, "s16")
    arena = GrowingArena(geometry, growth, known_tokens=5)
    truth = np.random.default_rng(0).integers(-999, 999, (3, 4, tokens, 4), np.int16)
    for start, stop in ((0, 5), *((t, t + 1) for t in range(5, tokens))):
        arena.begin(stop - start)
        for layer in range(3):
            arena.new(layer, stop - start)[:] = truth[layer, :, start:stop]
        arena.end(stop - start)
    assert all(np.array_equal(arena.held(layer), truth[layer]) for layer in range(3))
    report = report_growth(growth, (4 * geometry.row_bytes,) * 3, tokens, known_tokens=5)
    assert (arena.peak_bytes, arena.live_bytes) == (report.peak_bytes, report.steady_bytes)
    assert arena.bytes_copied == report.copied_bytes


def test_the_process_really_allocates_the_peak_that_was_predicted() -> None:
    """Against the interpreter's own count of what numpy allocates, Python's objects included."""
    geometry = Geometry(LAYERS, 4, 64, 4096)
    peaks = []
    for growth in (Steps.equal(LAYERS), Steps.staggered(LAYERS)):
        tracemalloc.start()
        arena = GrowingArena(geometry, growth)
        for _ in range(300):
            arena.begin(1)
            arena.end(1)
        _, traced = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        predicted = report_growth(growth, (8 * 64,) * LAYERS, 300).peak_bytes
        assert predicted == arena.peak_bytes <= traced < predicted * 1.01
        peaks.append(traced)
    assert peaks[1] < peaks[0]


@given(st.sampled_from([None, 0, 1]), st.lists(st.tuples(st.sampled_from([1, 4]), st.integers(1, 4)), max_size=20))
def test_every_graph_of_a_ladder_sees_the_newest_tokens(spacing: int | None, steps: list[tuple[int, int]]) -> None:
    ladder = ContextLadder((8, 16, 32), 3, spacing)
    arena = GrowingArena(Geometry(3, 1, 1, 32, "s16"), ladder)
    held: list[int] = []
    for ar, kept in steps:
        if len(held) + ar > 32:
            break
        arena.begin(ar)
        windows = [ladder.window(arena.home(layer), len(held), ar) for layer in range(3)]
        for layer, seen in enumerate(windows):
            window, rows = seen.window, arena.buffer(layer)[0, :, 0]
            past = rows[window.past_row : window.past_row + seen.context - ar]
            assert past[window.first : window.stop].tolist() == held
            rows[window.new_row : window.new_row + ar] = range(len(held), len(held) + ar)
        assert len({seen.context for seen in windows}) == 1
        kept = min(ar, kept)
        arena.end(kept)
        held.extend(range(len(held), len(held) + kept))
    if spacing is None:
        assert arena.bytes_copied == 0


def test_a_ladder_grows_one_layer_at_a_time() -> None:
    row_bytes = (1,) * LAYERS
    reports = {n: report_growth(ContextLadder((128, 256, 512), LAYERS, n), row_bytes, 512) for n in (None, 0, 4)}
    assert [reports[n].most_layers for n in (None, 0, 4)] == [0, LAYERS, 1]
    assert 8 * reports[4].excess_bytes <= reports[0].excess_bytes
    assert reports[4].peak_bytes < reports[0].peak_bytes
    assert reports[None].copied_bytes == reports[None].excess_bytes == 0


def test_what_no_context_has_room_for_is_refused() -> None:
    with pytest.raises(ContextFullError, match="contexts of 8, 16 tokens: found 17 tokens; wanted at most 16"):
        ContextLadder((8, 16), 1).window(15, 16, 1)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="step_rows: found 31; wanted at least 32"):
        Steps.staggered(32, 31)
    with pytest.raises(ValueError, match="spacing_tokens: found 32 tokens for all layers; wanted at most 8"):
        ContextLadder((8, 16), 32, 1)
    with pytest.raises(ValueError, match="home: found row 7; wanted at least 15"):
        ContextLadder((8, 16), 1).window(7, 8, 1)
    with pytest.raises(ValueError, match="contexts"):
        ContextLadder((16, 8), 1)
    with pytest.raises(ValueError, match="wanted no more than"):
        GrowingArena(Geometry(1, 1, 1, 8), Steps.equal(1, 4)).end(5)
