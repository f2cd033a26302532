"""Pieces that only follow each other, for one worker at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from exporters.pipeline.piece import Piece


def find_chains(pieces: Mapping[str, Piece]) -> list[list[str]]:
    """All pieces in chains, such as the layers, the head and the graphs of a bundle.

    A worker that does a chain keeps the residual and the weights in memory from piece to piece. A chain ends where
    something else could go on beside it, so that chains cost no parallelism, and before the work of a child process,
    which has RAM of its own.

    Args:
        pieces: by name, each after those that it needs; what is needed and not here is finished.

    Returns:
        Names, each chain after those that it needs.
    """
    below: dict[str, set[str]] = {}  # all that a piece follows from
    above: defaultdict[str, list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        needs = pieces.keys() & piece.needs
        below[name] = needs.union(*(below[need] for need in needs))
        for need in needs:
            above[need].append(name)
    chains, chain_of = list[list[str]](), dict[str, list[str]]()
    for name, piece in pieces.items():
        needs = pieces.keys() & piece.needs
        before = [need for need in needs if needs - {need} <= below[need]]
        if before and _only_follows(before[0], name, pieces, above, below) and chain_of[before[0]][-1] == before[0]:
            chain = chain_of[before[0]]
        else:
            chains.append(chain := [])
        chain.append(name)
        chain_of[name] = chain
    return chains


def _only_follows(
    one: str, next_one: str, pieces: Mapping[str, Piece], above: Mapping[str, list[str]], below: Mapping[str, set[str]]
) -> bool:
    """Whether all that follows from a piece waits for the next one too."""
    if pieces[one].in_child or pieces[next_one].in_child:
        return False
    return all(next_one in below[other] for other in above[one] if other != next_one)
