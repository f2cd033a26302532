from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import ContextFullError
from edgekv.kv import STRATEGIES, KVCache, RowSpec, Window
from edgekv.kv.beam_cache import BeamCache
from tests.kv_graph import rows_of

GEOMETRY = RowSpec(layers=1, kv_heads=2, head_dim=8, context=16)
ROW_BYTES = GEOMETRY.tensors * GEOMETRY.row_bytes
KINDS = [*product(STRATEGIES, ("rows", "columns"))]
ALL = pytest.mark.parametrize("kind", KINDS, ids=",".join)


def _prompt(kind: tuple[str, str], tokens: int) -> KVCache:
    """A cache whose token i has rows of i."""
    strategy, layout = kind
    cache = KVCache(replace(GEOMETRY, key_layout=layout), ar=[1, 4], strategy=strategy)
    for token in range(tokens):
        _write(cache, cache.window(1), token)
        cache.commit(1)
    return cache


def _write(cache: KVCache, windows: tuple[Window, ...], value: int) -> None:
    """What a graph does: it writes a row where the window says."""
    for arena in cache.arenas:
        for tensor, address in enumerate(arena.new_addresses(windows[0])):
            at = address + arena.new_offset_bytes(windows[0])
            rows_of(arena, tensor, at, arena.new_shape(windows[0].ar))[0] = value


@given(st.sampled_from(KINDS), st.integers(1, 12), st.data())
def test_the_mask_opens_the_prompt_and_the_own_rows_of_each_beam(
    kind: tuple[str, str], prompt: int, data: st.DataObject
) -> None:
    """Read through the window as the graph does, after any reordering; 16 tokens hold not all rows of 4 beams."""
    cache = _prompt(kind, prompt)
    kept = 15 - prompt
    beams = BeamCache(cache, 4, kept=kept)
    naive: list[list[int]] = [[] for _ in range(4)]
    for step in range(kept + 1):
        assert beams.position == prompt + step
        for beam in range(4):
            columns, window = beams.columns(beam), beams.window
            for arena in cache.arenas:
                for tensor, address in enumerate(arena.addresses):
                    at = address + arena.past_offset_bytes(window)
                    past = rows_of(arena, tensor, at, arena.past_shape(window.columns))
                    assert [int(row[0]) for row in past[window.first : window.stop]] == list(range(prompt))
                    assert np.array_equal(past[columns], np.tile(np.array(naive[beam])[:, None], (1, 8)))
            _write(cache, (beams.window,), 100 + 4 * step + beam)
            if step < kept:
                beams.keep(beam)
                naive[beam].append(100 + 4 * step + beam)
        parents = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
        before = beams.bytes_kept + beams.bytes_gathered
        beams.reorder(parents)
        assert beams.bytes_kept + beams.bytes_gathered == before
        naive = [list(naive[parent]) for parent in parents]
    assert beams.bytes_kept == 4 * kept * ROW_BYTES


@ALL
def test_reordering_copies_nothing_and_gathering_only_what_the_window_lacks(kind: tuple[str, str]) -> None:
    cache = _prompt(kind, 3)
    beams = BeamCache(cache, 2, kept=12)
    for held in range(12):
        before = beams.bytes_gathered
        for beam in range(2):
            beams.columns(beam)
            beams.keep(beam)
        # Two distinct pasts and 12 free columns: a row that is too many is exchanged once for each beam at most.
        most = 2 * max(0, 2 * held + 1 - 12)
        assert (beams.bytes_gathered - before) // ROW_BYTES <= 2 * most
        beams.reorder([1, 0])
    assert beams.bytes_gathered > 0


@ALL
def test_the_cache_holds_the_prompt_alone_before_and_after(kind: tuple[str, str]) -> None:
    cache = _prompt(kind, 5)
    stats = cache.stats
    beams = BeamCache(cache, 3, kept=2)
    for _ in range(2):
        for beam in range(3):
            beams.columns(beam)
            _write(cache, (beams.window,), 99)
            beams.keep(beam)
        beams.reorder([0, 0, 1])
    assert cache.stats == stats
    for arena in cache.arenas:
        assert [int(row[0]) for row in arena.read(0, cache.held_rows())] == list(range(5))


def test_memory_is_that_of_one_sequence_while_all_beams_fit_into_it() -> None:
    cache = _prompt(("slot", "rows"), 3)
    assert BeamCache(cache, 4, kept=3).bytes_held == cache.stats.bytes_held
    more = BeamCache(cache, 4, kept=4)
    assert more.bytes_held == cache.stats.bytes_held + more.spill_bytes
    assert more.spill_bytes >= 5 * ROW_BYTES


def test_a_full_cache_is_refused() -> None:
    with pytest.raises(ContextFullError, match="context of 16 tokens: got 16 tokens held"):
        BeamCache(_prompt(("slot", "rows"), 16), 2, kept=0)
    with pytest.raises(ValueError, match="got 2 beams of 6 rows; expected beams of 0 to 5 rows"):
        BeamCache(_prompt(("slot", "rows"), 10), 2, kept=6)
