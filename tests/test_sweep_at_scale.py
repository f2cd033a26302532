"""The simulation of a sweep on many workers, on plans whose times are known."""

from __future__ import annotations

import pytest

from benchmarks.sweep_at_scale import Piece, make_plans, pieces, simulate, ways
from edgekv.spec import Decoder

GB = 10**9


def piece(name: str, *needs: str, seconds: float = 1.0, moved: float = 0.0) -> Piece:
    return Piece(name, "work", seconds, GB, moved, needs)


def seconds(plan: list[Piece], workers: int, task_s: float = 0.0) -> float:
    return simulate(plan, workers, 2 * GB, 1e9, 2e9, task_s).seconds


def test_a_chain_takes_its_length_whatever_the_workers():
    chain = [piece("a"), piece("b", "a"), piece("c", "b")]
    assert seconds(chain, 1) == seconds(chain, 10) == 3
    assert max(ways(chain, 1e9).values()) == 3


def test_independent_pieces_are_shared_among_workers():
    assert seconds([piece(str(number)) for number in range(8)], 4) == 2


def test_the_longest_way_goes_first():
    plan = [piece("short"), piece("x", seconds=2), piece("last", "x", seconds=2)]
    assert seconds(plan, 2) == 4


def test_bytes_take_time_on_a_shared_file_system():
    moving = [piece(str(number), seconds=0, moved=1e9) for number in range(4)]
    assert seconds(moving[:1], 1) == 1
    assert seconds(moving, 4) == 2, "the fourth has half of its link"


def test_a_scheduler_gives_out_one_piece_at_a_time():
    assert seconds([piece(str(number)) for number in range(4)], 4, task_s=0.5) == 3


def test_a_piece_that_no_worker_has_ram_for_is_refused():
    with pytest.raises(SystemExit, match=r"a needs 1.0 GB"):
        simulate([piece("a")], 1, GB - 1, 1e9, 1e9, 0)


def test_each_piece_comes_after_what_it_needs():
    plan = list(pieces(Decoder(80, 8192, 64, 8, 128, 28672, 128256), make_plans(), divided=True))
    seen = set[str]()
    for each in plan:
        assert seen.issuperset(each.needs)
        assert each.name not in seen
        seen.add(each.name)
