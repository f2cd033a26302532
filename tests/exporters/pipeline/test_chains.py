"""Chains of pieces: everything once, in order, and nothing waits that could go on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from hypothesis import given, strategies as st

from exporters.pipeline.chains import find_chains
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece


@dataclass(frozen=True, slots=True)
class Work(Piece):
    kind: ClassVar[str] = "test"

    needs: tuple[str, ...] = ()  # type: ignore[assignment]  # a field instead of a property

    def make(self, folder: Path, inputs: Inputs) -> object:
        return None


@dataclass(frozen=True, slots=True)
class InChild(Work):
    in_child: ClassVar[bool] = True


def chains(**needs: str) -> list[str]:
    """Chains of pieces `a="b c"`: a needs b and c."""
    return ["".join(chain) for chain in find_chains({name: Work(tuple(of.split())) for name, of in needs.items()})]


def test_the_layers_of_a_bundle_are_one_chain():
    """With all that waits for the last of them: s is the survey, w the graphs, which read all layers."""
    assert chains(s="", a="s", b="s a", c="s b", w="s a b c", r="s", e="w r", f="w") == ["s", "abcw", "r", "e", "f"]


def test_a_chain_ends_where_another_recipe_goes_on():
    assert chains(a="", b="a", c="b", d="b", e="d") == ["ab", "c", "de"]


def test_what_is_finished_and_not_here_is_no_reason_to_end_a_chain():
    assert chains(c="a b", d="a c") == ["cd"]


def test_the_work_of_a_child_process_stands_alone():
    pieces = {"a": Work(), "b": Work(("a",)), "c": InChild(("b",))}
    assert find_chains(pieces) == [["a", "b"], ["c"]]


@given(st.lists(st.frozensets(st.integers(0, 11), max_size=3), max_size=12))
def test_all_pieces_are_in_one_chain_that_starts_as_soon_as_each_of_them_could(found: list[frozenset[int]]):
    pieces = {str(at): Work(tuple(str(at - 1 - each) for each in needs if each < at)) for at, needs in enumerate(found)}
    made = find_chains(pieces)
    assert sorted(name for chain in made for name in chain) == sorted(pieces)
    done = set[str]()
    for chain in made:
        outside = {need for name in chain for need in pieces[name].needs} - {*chain}
        assert outside <= done, "chains are in order"
        assert outside <= _below(pieces, chain[0]), "nothing in the middle waits for others"
        for one, other in pairwise(chain):
            waiting = [name for name, piece in pieces.items() if one in piece.needs and name != other]
            assert all(other in _below(pieces, name) for name in waiting), "nothing waits for the rest of a chain"
        done |= {*chain}


def _below(pieces: dict[str, Piece], name: str) -> set[str]:
    return {*pieces[name].needs}.union(*(_below(pieces, need) for need in pieces[name].needs))
