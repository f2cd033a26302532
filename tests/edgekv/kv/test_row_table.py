"""Which rows belong to which sequence: batches, whose rows each have one owner, and beams, which are forks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from edgekv.kv.row_table import RowCopy, RowTable


def beams(count: int, columns: int, kept: int) -> RowTable:
    """Beams that fork a prompt of no token, and have room for `kept` rows each."""
    spill = count * kept + 1 - columns if count * kept > columns else 0
    table = RowTable(columns, spill)
    table.join(0, 0)
    table.fork(dict.fromkeys(range(count), 0))
    return table


def reorder(table: RowTable, parents: list[int]) -> None:
    table.fork(dict(enumerate(parents)))


@st.composite
def searches(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """Free columns, rows that a beam keeps, and the parents of all beams after each step."""
    count, kept = draw(st.integers(1, 5)), draw(st.integers(0, 8))
    columns = draw(st.integers(kept, kept * (count + 1)))
    parents = st.lists(st.integers(0, count - 1), min_size=count, max_size=count)
    return columns, kept, draw(st.lists(parents, min_size=kept, max_size=kept))


@given(searches())
def test_every_fork_finds_its_own_tokens_in_the_window(search: tuple[int, int, list[list[int]]]) -> None:
    """Against beams that are plain lists, copied at every turn."""
    columns, kept, schedule = search
    count = len(schedule[0]) if schedule else 2
    table = beams(count, columns, kept)
    memory: dict[int, tuple[int, int]] = {}
    naive: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for step, parents in enumerate([*schedule, []]):
        for beam in range(count):
            for copy in table.gather(beam):
                memory[copy.dst_row] = memory[copy.src_row]
            rows = table.of(beam)
            assert all(row < columns for row in rows)
            assert [memory[row] for row in rows] == naive[beam]
            if step < kept:
                naive[beam].append((step, beam))
                memory[table.append(beam)] = (step, beam)
        if parents:
            reorder(table, parents)
            naive = [list(naive[parent]) for parent in parents]
            assert table.used == len({token for beam in naive for token in beam})


@given(searches())
def test_nothing_is_gathered_while_all_rows_fit(search: tuple[int, int, list[list[int]]]) -> None:
    _, kept, schedule = search
    count = len(schedule[0]) if schedule else 2
    table = beams(count, count * kept, kept)
    assert table.spill == 0
    for parents in schedule:
        for beam in range(count):
            assert table.gather(beam) == ()
            table.append(beam)
        reorder(table, parents)


def test_rows_of_sequences_that_join_have_one_owner() -> None:
    chance = random.Random(5)
    table, held = RowTable(12), dict[int, list[int]]()
    for _ in range(300):
        sequence = chance.randrange(4)
        if sequence not in held and table.free >= 3:
            held[sequence] = list(table.join(sequence, 3))
        elif sequence in held and table.free and chance.random() < 0.7:
            held[sequence].append(table.append(sequence))
        else:
            table.leave(sequence)
            held.pop(sequence, None)
        owned = [row for rows in held.values() for row in rows]
        assert sorted(table.sequences) == sorted(held) and table.free == 12 - len(owned)
        assert len(set(owned)) == len(owned) and set(owned) <= set(range(12))
        assert all(list(table.of(name)) == rows for name, rows in held.items())
    table.leave("nobody")


def test_a_fork_shares_the_rows_of_its_parent_until_both_have_left() -> None:
    table = RowTable(8)
    table.adopt("text", range(2, 5))
    table.fork({"draft": "text"})
    assert table.append("draft") == 0 and list(table.of("draft")) == [2, 3, 4, 0]
    assert list(table.of("text")) == [2, 3, 4] and table.used == 4
    table.leave("text")
    assert table.used == 4
    table.leave("draft")
    assert table.used == 0


def test_only_the_rows_that_a_sequence_lacks_are_exchanged() -> None:
    table = beams(2, 3, 3)
    for _ in range(2):
        table.append(0)
        table.append(1)
    assert [table.of(beam) for beam in (0, 1)] == [[0, 2], [1, 3]]
    assert table.gather(0) == ()
    assert table.gather(1) == [RowCopy(0, 4), RowCopy(3, 0)]  # a row of beam 0 makes room
    assert [table.of(beam) for beam in (0, 1)] == [[4, 2], [1, 0]]
    assert table.gather(1) == ()


def test_a_row_that_came_free_is_filled_without_putting_another_aside() -> None:
    table = beams(2, 3, 3)
    for _ in range(2):
        table.append(0)
        table.append(1)
    reorder(table, [1, 1])
    assert table.used == 2
    assert len(table.gather(0)) == 1
    assert table.gather(1) == ()


def test_a_common_past_is_held_once() -> None:
    table = beams(4, 40, 10)
    for _ in range(10):
        for beam in range(4):
            table.append(beam)
        reorder(table, [2, 2, 2, 2])
    assert table.used == 10
    assert len({tuple(table.of(beam)) for beam in range(4)}) == 1


def test_what_cannot_be_is_refused() -> None:
    table = RowTable(2)
    with pytest.raises(ValueError, match="join: got 3 tokens; expected a new sequence of at most 2"):
        table.join(0, 3)
    table.join(0, 2)
    with pytest.raises(ValueError, match="append: got 2 rows and 0 free"):
        table.append(0)
    with pytest.raises(ValueError, match="parents: got 7"):
        table.fork({1: 7})
    with pytest.raises(ValueError, match="adopt: got 1 sequences"):
        table.adopt(1, range(1))
    spilled = RowTable(2, 4)
    spilled.join(0, 2)
    with pytest.raises(ValueError, match="append: got 2 rows and 4 free; expected below 2"):
        spilled.append(0)
