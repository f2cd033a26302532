"""Which texts share a pass of a model that writes none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Manifest
from edgekv.engine.request import Request
from edgekv.engine.session import common_tokens


@dataclass(frozen=True, slots=True)
class Pack:
    """Texts of one request: one as it is, or several as its branches.

    Attributes:
        request: what the engine runs.
        numbers: of the texts, in the order of the branches.
    """

    request: Request
    numbers: tuple[int, ...]

    def rows_of(self, rows: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """The number of each text and what it gives, with the rows of the sink in front of its own.

        Args:
            rows: what the engine gave, `[rows, width]`.
        """
        if not self.request.branches:
            yield self.numbers[0], rows
            return
        at = len(rows) - sum(map(len, self.request.branches))
        sink = rows[:at]
        for number, tokens in zip(self.numbers, self.request.branches, strict=True):
            own, at = rows[at : at + len(tokens)], at + len(tokens)
            yield number, np.concatenate([sink, own]) if len(sink) else own


def packed(requests: Sequence[Request], rows: int, manifest: Manifest) -> list[Pack]:
    """Texts in as few passes as their lengths let them be.

    Texts of which the last row alone is wanted may share what all of them begin with; it is run before them, if that
    saves a pass. Where tokens attend to both sides, a pass is as long as the shortest graph that has room for its
    longest text: scores grow with the square of a graph's length.

    Args:
        requests: for each text, equal but for their tokens.
        rows: of a pass; 0 if each text is to run by itself.
        manifest: of the bundle.
    """
    if manifest.model.bidirectional:
        lengths = sorted({graph.ar for graph in manifest.graphs if graph.role == "verify"})
        packs = _packed(requests, 0, lengths) if rows else [Pack(request, (at,)) for at, request in enumerate(requests)]
        return [_as_branches(requests, pack.numbers, 0) for pack in packs]
    alone = [Pack(request, (number,)) for number, request in enumerate(requests)]
    if not rows or len(requests) < 2:
        return alone
    sink = 0 if manifest.sink is None else len(manifest.sink.tokens)
    starts = {sink}
    if all(request.ends for request in requests):
        shortest, longest = (choose(request.tokens for request in requests) for choose in (min, max))
        starts.add(min(common_tokens(shortest, longest), min(len(request.tokens) for request in requests) - 1))
    ways = [_packed(requests, start, (rows,)) for start in sorted(starts) if start + rows <= manifest.context]
    return min(ways, key=lambda way: _passes(way, rows), default=alone)


def _packed(requests: Sequence[Request], start: int, passes: Sequence[int]) -> list[Pack]:
    """The packs of texts that all begin with the same `start` tokens: each goes where it leaves least room.

    Packs are as long as one of the passes, ascending; texts that are longer are alone.
    """
    rows = passes[-1]
    made, packs = list[Pack](), list[list[int]]()
    free: list[list[int]] = [[] for _ in range(rows + 1)]  # numbers of packs, by the rows that they have left
    lengths = [len(request.tokens) - start for request in requests]
    for number in sorted(range(len(requests)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if not 0 < length <= rows:
            made.append(Pack(requests[number], (number,)))
            continue
        left = next((left for left in range(length, rows + 1) if free[left]), None)
        if left is None:
            packs.append([])
            pack, left = len(packs) - 1, next(longest for longest in passes if length <= longest)
        else:
            pack = free[left].pop()
        packs[pack].append(number)
        free[left - length].append(pack)
    for numbers in packs:
        is_alone = len(numbers) == 1
        made.append(Pack(requests[numbers[0]], (*numbers,)) if is_alone else _as_branches(requests, numbers, start))
    return made


def _as_branches(requests: Sequence[Request], numbers: Sequence[int], start: int) -> Pack:
    """Texts as the branches of a request behind the `start` tokens that all of them begin with."""
    first, branches = requests[numbers[0]], tuple(requests[number].tokens[start:] for number in numbers)
    request = replace(first, tokens=first.tokens[:start], ends=False, scores=False, branches=branches)
    return Pack(request, tuple(numbers))


def _passes(packs: Sequence[Pack], rows: int) -> int:
    """How many passes they take; what packs begin with is run once."""
    shared = max((len(pack.request.tokens) for pack in packs if pack.request.branches), default=0)
    alone = sum(-(-len(pack.request.tokens) // rows) for pack in packs if not pack.request.branches)
    return -(-shared // rows) + alone + sum(bool(pack.request.branches) for pack in packs)
