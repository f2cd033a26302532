from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgekv.kv.beam_table import BeamTable, RowCopy


@st.composite
def searches(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Free columns, rows that a beam keeps, and the parents of all beams after each step."""
    beams, kept = draw(st.integers(1, 5)), draw(st.integers(0, 8))
    columns = draw(st.integers(kept, kept * (beams + 1)))
    parents = st.lists(st.integers(0, beams - 1), min_size=beams, max_size=beams)
    return columns, kept, draw(st.lists(parents, min_size=kept, max_size=kept))


@given(searches())
def test_every_beam_finds_its_own_tokens_in_the_window(search: tuple[int, int, list[list[int]]]) -> None:
    """Against beams that are plain lists, copied at every turn."""
    columns, kept, schedule = search
    beams = len(schedule[0]) if schedule else 2
    table = BeamTable(beams, columns=columns, kept=kept)
    memory: dict[int, tuple[int, int]] = {}
    naive: list[list[tuple[int, int]]] = [[] for _ in range(beams)]
    for step, parents in enumerate([*schedule, []]):
        for beam in range(beams):
            for copy in table.gather(beam):
                memory[copy.dst_row] = memory[copy.src_row]
            rows = table.rows(beam)
            assert all(row < columns for row in rows)
            assert [memory[row] for row in rows] == naive[beam]
            if step < kept:
                naive[beam].append((step, beam))
                memory[table.append(beam)] = (step, beam)
        if parents:
            table.reorder(parents)
            naive = [list(naive[parent]) for parent in parents]
            assert table.used == len({token for beam in naive for token in beam})


@given(searches())
def test_nothing_is_gathered_while_all_rows_fit(search: tuple[int, int, list[list[int]]]) -> None:
    _, kept, schedule = search
    beams = len(schedule[0]) if schedule else 2
    table = BeamTable(beams, columns=beams * kept, kept=kept)
    assert table.spill == 0
    for parents in schedule:
        for beam in range(beams):
            assert table.gather(beam) == ()
            table.append(beam)
        table.reorder(parents)


def test_only_the_rows_that_a_beam_lacks_are_exchanged() -> None:
    table = BeamTable(2, columns=3, kept=3)
    for _ in range(2):
        table.append(0)
        table.append(1)
    assert [table.rows(beam) for beam in (0, 1)] == [(0, 2), (1, 3)]
    assert table.gather(0) == ()
    assert table.gather(1) == [RowCopy(0, 4), RowCopy(3, 0)]  # a row of beam 0 makes room
    assert [table.rows(beam) for beam in (0, 1)] == [(4, 2), (1, 0)]
    assert table.gather(1) == ()


def test_a_row_that_came_free_is_filled_without_putting_another_aside() -> None:
    table = BeamTable(2, columns=3, kept=3)
    for _ in range(2):
        table.append(0)
        table.append(1)
    table.reorder([1, 1])
    assert table.used == 2
    assert len(table.gather(0)) == 1
    assert table.gather(1) == ()


def test_a_common_past_is_held_once() -> None:
    table = BeamTable(4, columns=40, kept=10)
    for _ in range(10):
        for beam in range(4):
            table.append(beam)
        table.reorder([2, 2, 2, 2])
    assert table.used == 10
    assert len({table.rows(beam) for beam in range(4)}) == 1


def test_memory_beside_the_window_is_what_the_worst_search_needs() -> None:
    assert BeamTable(4, columns=100, kept=25).spill == 0
    assert BeamTable(4, columns=100, kept=26).spill == 5  # 4 rows, and one to exchange


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 beams of 4 rows; expected beams of 0 to 3 rows"):
        BeamTable(2, columns=3, kept=4)
    table = BeamTable(2, columns=3, kept=0)
    with pytest.raises(ValueError, match=r"parents: got \[0, 2\]; expected 2 numbers of beams"):
        table.reorder([0, 2])
    with pytest.raises(ValueError, match="append: got 0 rows of beam 1"):
        table.append(1)
