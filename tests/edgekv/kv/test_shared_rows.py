from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgekv.errors import ContextFullError
from edgekv.kv import STRATEGIES, KVCache, RowSpec, SharedRows, Window
from tests.support.kv_graph import rows_of

GEOMETRY = RowSpec(layers=1, kv_heads=2, head_dim=8, window=16)
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


def _write(cache: KVCache, windows: tuple[Window, ...], value: int, at: int = 0) -> None:
    """What a graph does: it writes a row where the window says."""
    for arena in cache.arenas:
        for tensor, address in enumerate(arena.new_addresses(windows[0])):
            start = address + arena.new_offset_bytes(windows[0])
            rows_of(arena, tensor, start, arena.new_shape(windows[0].ar))[at] = value


def _beams(cache: KVCache, count: int, kept: int, ar: int = 1) -> SharedRows:
    """Forks of the prompt, which keep so many rows each."""
    shared = SharedRows(cache, ar, rows=count * kept)
    shared.adopt(0)
    shared.fork(dict.fromkeys(range(count), 0))
    return shared


def _keep(shared: SharedRows, beam: int, at: int = 0) -> None:
    shared.keep(beam, shared.cache.new_row(shared.windows, at))


@given(st.sampled_from(KINDS), st.integers(1, 12), st.sampled_from((1, 4)), st.data())
def test_the_mask_opens_the_rows_of_each_fork(kind: tuple[str, str], prompt: int, ar: int, data: st.DataObject) -> None:
    """Read through the window as the graph does, after any fork; 16 tokens hold not all rows of 4 beams."""
    cache = _prompt(kind, prompt)
    kept = 16 - ar - prompt
    shared = _beams(cache, 4, kept, ar)
    naive: list[list[int]] = [[*range(prompt)] for _ in range(4)]
    for step in range(kept + 1):
        for beam in range(4):
            columns, (window,) = shared.columns(beam), shared.windows
            assert len(columns) == prompt + step
            for arena in cache.arenas:
                for tensor, address in enumerate(arena.addresses):
                    start = address + arena.past_offset_bytes(window)
                    past = rows_of(arena, tensor, start, arena.past_shape(window.columns))
                    assert np.array_equal(past[columns], np.tile(np.array(naive[beam])[:, None], (1, 8)))
            at = beam % ar
            _write(cache, shared.windows, 100 + 4 * step + beam, at)
            if step < kept:
                _keep(shared, beam, at)
                naive[beam].append(100 + 4 * step + beam)
        parents = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
        before = shared.bytes_kept + shared.bytes_gathered
        shared.fork(dict(enumerate(parents)))
        assert shared.bytes_kept + shared.bytes_gathered == before
        naive = [list(naive[parent]) for parent in parents]
    assert shared.bytes_kept == 4 * kept * ROW_BYTES


@ALL
def test_a_fork_copies_nothing_and_gathering_only_what_the_window_lacks(kind: tuple[str, str]) -> None:
    shared = _beams(_prompt(kind, 3), 2, 12)
    for held in range(12):
        before = shared.bytes_gathered
        for beam in range(2):
            shared.columns(beam)
            _keep(shared, beam)
        # Two distinct pasts and 12 free columns: a row that is too many is exchanged once for each beam at most.
        exchanged = 2 * max(0, 2 * held + 1 - 12)
        assert (shared.bytes_gathered - before) // ROW_BYTES <= 2 * exchanged
        shared.fork({0: 1, 1: 0})
    assert shared.bytes_gathered > 0


@ALL
def test_the_cache_holds_the_prompt_alone_before_and_after(kind: tuple[str, str]) -> None:
    cache = _prompt(kind, 5)
    stats = cache.stats
    shared = _beams(cache, 3, 2)
    for _ in range(2):
        for beam in range(3):
            shared.columns(beam)
            _write(cache, shared.windows, 99)
            _keep(shared, beam)
        shared.fork({0: 0, 1: 0, 2: 1})
    assert cache.stats == stats
    for arena in cache.arenas:
        assert [int(row[0]) for row in arena.read(0, cache.held_rows())] == list(range(5))


def test_texts_that_join_are_copied_side_by_side() -> None:
    window = KVCache(GEOMETRY, ar=[4], strategy="slot")
    with window.hold(12):
        pass
    shared = SharedRows(window, 4)
    for name, tokens in (("one", 3), ("other", 5)):
        shared.join(name, _prompt(("slot", "rows"), tokens))
    assert shared.bytes_joined == 8 * ROW_BYTES
    (arena,) = window.arenas
    for name, tokens in (("one", 3), ("other", 5)):
        assert [int(row[0]) for row in arena.read(0, shared.columns(name))] == list(range(tokens))


def test_memory_is_that_of_one_sequence_while_all_forks_fit_into_it() -> None:
    cache = _prompt(("slot", "rows"), 3)
    assert _beams(cache, 4, 3).bytes_held == cache.stats.bytes_held
    more = _beams(cache, 4, 4)
    assert more.bytes_held == cache.stats.bytes_held + more.spill_bytes
    assert more.table.spill == 5  # 4 rows, and one to exchange
    assert more.spill_bytes >= 5 * ROW_BYTES


def test_a_full_cache_is_refused() -> None:
    with pytest.raises(ContextFullError, match="context of 16 tokens: got 16 tokens held"):
        SharedRows(_prompt(("slot", "rows"), 16), 1)
