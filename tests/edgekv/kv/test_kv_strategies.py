"""Every reachable state of small caches, in pure integers: what holds for each transition holds for each schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given, strategies as st

from edgekv.kv import (
    POLICIES,
    STRATEGIES,
    Mirror,
    Move,
    PointerShift,
    Policy,
    RowGroup,
    RowSpec,
    ShiftConcat,
    Slot,
    Strategy,
    Window,
    make_strategy,
)
from edgekv.kv.strategies.strategy import moves_of
from tests.support.thorough import variants

Cells = dict[str, list[int | None]]


class Mirrored(list[int | None]):
    """Rows that come twice; only slices are read and written."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, part):
        if isinstance(part, int):
            return super().__getitem__(part % (len(self) // 2))
        return [self[row] for row in range(*part.indices(len(self)))]

    def __setitem__(self, part, values):
        if isinstance(part, int):
            super().__setitem__(part % (len(self) // 2), values)
        else:
            for row, value in zip(range(*part.indices(len(self))), values, strict=True):
                self[row] = value


def cells_of(strategy: Strategy) -> Cells:
    """The arena as lists: each held token, numbered by age, in its row."""
    rows = strategy.rows
    cells: Cells = {"arena": Mirrored([None] * rows) if strategy.mirrored else [None] * rows}
    cells["scratch"] = [None] * strategy.scratch_rows
    for age, row in enumerate(strategy.held_rows()):
        cells["arena"][row] = age
    return cells


def execute(cells: Cells, moves: Sequence[Move]) -> None:
    for move in moves:
        source, target = cells[move.src], cells[move.dst]
        assert move.rows >= 1
        assert 0 <= move.src_row <= len(source) - move.rows
        assert 0 <= move.dst_row <= len(target) - move.rows
        target[move.dst_row : move.dst_row + move.rows] = source[move.src_row : move.src_row + move.rows]


def step(strategy: Strategy, policy: Policy, context: int, ar: int, tokens: int) -> None:
    """One step that keeps `tokens` of its rows, checked from what it reads to what is held in the end."""
    length, cells = strategy.length, cells_of(strategy)
    execute(cells, strategy.prepare(ar, context - ar))
    window = strategy.window(ar, context - ar)
    past = cells["arena"][window.past_row : window.past_row + context - ar]
    assert len(past) == context - ar
    assert window.past_row >= 0 and window.new_row >= 0 and 0 <= window.first <= window.stop <= context - ar
    valid = [-1 if age is None else age for age in past[window.first : window.stop]]
    in_order = not isinstance(strategy, Slot)
    assert (valid if in_order else sorted(valid)) == list(range(max(0, length - (context - ar)), length))
    landing = cells["arena" if window.in_place else "scratch"]
    assert window.new_row + ar <= len(landing)
    landing[window.new_row : window.new_row + ar] = [length + i if i < tokens else None for i in range(ar)]
    evicted = max(0, length + tokens - policy.capacity(context))
    execute(cells, strategy.commit(tokens, evicted))
    assert [cells["arena"][row] for row in strategy.held_rows()] == list(range(evicted, length + tokens))
    assert strategy.length == length + tokens - evicted


def rewind(strategy: Strategy, tokens: int) -> None:
    length, cells = strategy.length, cells_of(strategy)
    execute(cells, strategy.rewind(tokens))
    assert [cells["arena"][row] for row in strategy.held_rows()] == list(range(length - tokens))
    assert strategy.length == length - tokens


def drop(strategy: Strategy, ages: Sequence[int]) -> None:
    length, cells = strategy.length, cells_of(strategy)
    execute(cells, strategy.drop(ages))
    kept = [age for age in range(length) if age not in ages]
    assert [cells["arena"][row] for row in strategy.held_rows()] == kept
    assert strategy.length == len(kept)


def subsets(length: int) -> list[tuple[int, ...]]:
    """Each token alone, each run of tokens, and every second one."""
    runs = [tuple(range(i, j)) for i in range(length) for j in range(i + 1, length + 1)]
    return [*runs, tuple(range(0, length, 2)), tuple(range(1, length, 2))]


def explore(strategy: Strategy, policy: Policy, context: int, ars: Sequence[int]) -> int:
    """Check every transition out of every state that can be reached; returns how many states there are."""
    pending, known = [strategy], set[str]()
    while pending:
        state = pending.pop()
        # An empty ring is as good as any other, wherever its head is.
        key = str((state.held_rows(), state.first_row(0) if state.length else None))
        if key in known:
            continue
        known.add(key)
        for ar in ars:
            if policy.evicts or state.length <= context - ar:
                for tokens in range(ar + 1):
                    following = deepcopy(state)
                    step(following, policy, context, ar, tokens)
                    pending.append(following)
        for tokens in range(state.length + 1):
            following = deepcopy(state)
            rewind(following, tokens)
            pending.append(following)
        for ages in subsets(state.length):
            following = deepcopy(state)
            drop(following, ages)
            pending.append(following)
    return len(known)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("context", variants([2, 3, 4, 5, 6], [2, 3, 4, 5]))
@pytest.mark.parametrize(
    "make",
    [
        lambda geometry, ar: PointerShift(geometry, 2, max_ar=ar),
        lambda geometry, ar: PointerShift(geometry, Fraction(3, 2), max_ar=ar),
        lambda geometry, ar: PointerShift(geometry, 1.1, max_ar=ar),
        lambda geometry, ar: Slot(geometry, max_ar=ar),
        lambda geometry, ar: ShiftConcat(geometry, max_ar=ar),
        lambda geometry, ar: Mirror(geometry, max_ar=ar, page_bytes=1),
        lambda geometry, ar: Mirror(geometry, max_ar=ar, page_bytes=4),
    ],
    ids=["pointer-shift-2", "pointer-shift-1.5", "pointer-shift-1.1", "slot", "shift-concat", "mirror", "mirror-pages"],
)
def test_every_transition_of_every_reachable_state(
    make: Callable[[RowSpec, int], Strategy], context: int, policy: Policy
) -> None:
    geometry = RowSpec(layers=1, kv_heads=1, head_dim=1, window=context)
    for max_ar in range(1, context):
        for ars in {(max_ar,), (1, max_ar), tuple(range(1, max_ar + 1))}:
            assert explore(make(geometry, max_ar), policy, context, ars) > 1


@given(st.sampled_from(STRATEGIES), st.integers(0, 40), st.sampled_from([1, 4]), st.integers(1, 20))
@pytest.mark.parametrize("window", [12, 30])
def test_a_step_that_reads_only_rows_in_use_reads_the_same_tokens(
    window: int, name: str, tokens: int, ar: int, block: int
) -> None:
    """In a context of 30, also of layers that see 12 tokens."""
    geometry = RowSpec(layers=1, kv_heads=1, head_dim=1, window=window)
    group = RowGroup(geometry, partial(make_strategy, name, max_ar=4), (1, 4), window - 1, 30)
    for _ in range(tokens):
        group.window(1, 30)
        group.commit(1)
    whole, part = group.window(ar, 30), group.window(ar, 30, block)
    assert part.columns == whole.columns or (part.columns % block == 0 and part.columns < whole.columns)
    assert part.columns == min(whole.columns, -(-group.length // block) * block)
    rows = group.strategy.rows

    def read(window: Window) -> list[list[int]]:
        columns = range(window.first, window.stop), window.leaving
        return [[(window.past_row + column) % rows for column in each] for each in columns]

    assert read(part) == read(whole)
    assert (part.new_row % rows, part.in_place) == (whole.new_row % rows, whole.in_place)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_neighbouring_rows_move_together(pairs: list[tuple[int, int]]) -> None:
    moves = moves_of([src for src, _ in pairs], [dst for _, dst in pairs])
    assert [(move.src_row + at, move.dst_row + at) for move in moves for at in range(move.rows)] == pairs
    ends = [(move.src_row + move.rows, move.dst_row + move.rows) for move in moves]
    assert all((move.src_row, move.dst_row) != end for end, move in zip(ends, moves[1:], strict=False))
