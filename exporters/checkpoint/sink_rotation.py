"""Turns that put values of the sink on the grid of a cache of 8 bits.

A head's values may be rotated by any rotation: o_proj is rotated back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from exporters.checkpoint.fold import Floats
from exporters.checkpoint.rotate import hadamard

_SHARES, _ROUNDS = 41, 6  # factors of the step that are tried, and alternations of rounding and turning
_OPPOSITE = 1e-3  # 1 + cosine of vectors that no turn is defined between

Doubles = NDArray[np.float64]


def sink_rotation(reach: float, row: Floats | None, width: int, limit: int, most: float) -> tuple[Floats, np.float32]:
    """The turn that puts a value on a lattice vector, and the step; no turn if the value is below 1 step."""
    step = np.float32(max(reach, 1e-30) / most)
    turn = np.zeros((2, width), np.float32)
    if row is None:
        return turn, step
    target = (row.astype(np.float64) @ hadamard(width)) / float(step)
    length = float(np.linalg.norm(target))
    tried = [np.clip(np.rint(target * share), -limit, limit) for share in np.linspace(0.8, 1.0, 81)]
    fitting = [point for point in tried if 0.5 * length < np.linalg.norm(point) <= length]
    if not fitting:
        return turn, step
    lattice = max(fitting, key=lambda point: float(np.linalg.norm(point)))
    step = np.float32(step * length / np.linalg.norm(lattice))
    return np.stack([target / length, lattice / np.linalg.norm(lattice)]).astype(np.float32), step


def sink_rotations(reach: float, rows: Floats, limit: int, most: float) -> tuple[Floats, np.float32]:
    """The turns that bring several values closest to lattice vectors, and the step.

    The rotation that maps values to given lattice vectors with the least error is that of the orthogonal Procrustes
    problem (Schoenemann 1966). As n values leave it all but n (n + 1) / 2 of its freedom, little error remains.

    Args:
        reach: of the values of all other tokens.
        rows: the values `[n, D]`.
        limit: the greatest integer of the cache.
        most: how many steps `reach` may have.

    Returns:
        As `AlignedHead.turn`, and the step.
    """
    step, width = max(reach, 1e-30) / most, rows.shape[1]
    target = (rows[:width].astype(np.float64) @ hadamard(width)) / step
    candidates: list[tuple[float, float, Doubles, Doubles]] = []
    for share in np.linspace(0.9, 1.0, _SHARES):
        values = target * share
        lattice, start, end = np.clip(np.rint(values), -limit, limit), np.eye(width), np.eye(width)
        for _ in range(_ROUNDS):
            start, end = _frames(values, lattice)
            again = np.clip(np.rint(values @ start @ end.T), -limit, limit)
            if np.array_equal(again, lattice):
                break
            lattice = again
        error = np.square(lattice - values @ start @ end.T).sum() / share**2
        candidates.append((float(error), float(share), start, end))
    _, share, start, end = min(candidates, key=lambda candidate: candidate[0])
    return _turns_between(start, end).astype(np.float32), np.float32(step / share)


def _frames(values: Doubles, lattice: Doubles) -> tuple[Doubles, Doubles]:
    """Orthonormal columns `[D, n]` twice: turning the first ones to the second ones turns values `[n, D]` to lattice
    vectors, with the least squared error.
    """
    (first, left), (second, right) = np.linalg.qr(values.T), np.linalg.qr(lattice.T)
    before, _, after = np.linalg.svd(left @ right.T)
    return first @ before, second @ after.T


def _turns_between(start: Doubles, end: Doubles) -> Doubles:
    """Pairs of vectors, `[2 * n, D]`, whose turns one after another take the columns `[D, n]` of `start` to `end`.

    A turn leaves all vectors alone that are orthogonal to both of its own, and so what earlier ones have reached.
    """
    rotation, pairs = np.eye(len(start)), []
    for source, target in zip(start.T, end.T, strict=True):
        now = rotation @ source
        if 1 + now @ target > _OPPOSITE:
            pairs += [now, target]
            rotation = turned(now, target) @ rotation
    return np.array(pairs).reshape(-1, len(start))


def turned(start: Doubles, end: Doubles) -> Doubles:
    """The rotation in the plane of two unit vectors that takes the first to the second; the identity for zeros."""
    start, end = (vector / max(float(np.linalg.norm(vector)), 1e-30) for vector in (start, end))
    plane = np.outer(end, start) - np.outer(start, end)
    rotation: Doubles = np.eye(len(start)) + plane + plane @ plane / (1 + start @ end)
    return rotation
