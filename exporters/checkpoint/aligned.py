"""Keys and values of each head, turned and scaled so that they fill the integers of the cache: the same logits.

Keys: the rotary embedding turns both elements of a pair (i, i + R/2) by one angle. A further turn by a fixed angle and
a factor for both commute with it. Keys get them, queries the inverse, which keeps every score. The angle makes the
greatest element of a pair as small as possible, and the factor lets every pair fill the range of the head's one scale.

Values: attention only adds them up, so a head's values are rotated and the columns of o_proj that read them are rotated
back (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). Where every channel has a gate before o_proj, they stay.

The sink: most attention goes to its one row, and rounding it costs more than rounding all others. The angles, the
factors and the rotation have room to put that row exactly on the grid of integers: a pair with a radius of n steps
moves to a lattice point of a radius slightly below n, and the value to a lattice vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from edgekv.bundle import HEADS_FILE
from edgekv.errors import BundleError
from edgekv.machine.system import read_file
from edgekv.machine.tensor_file import encode_tensors
from edgekv.spec import KINDS, DecoderSpec, KvTensor, View
from edgekv.spec.geometry import Kind, KvDtype
from exporters.checkpoint.fold import Floats, Fold
from exporters.checkpoint.head_range import ANGLES, HeadNumber, HeadRange
from exporters.checkpoint.rotate import hadamard
from exporters.checkpoint.sink_rotation import sink_rotation, sink_rotations, turned
from quant import Encoding

HEADROOM_8BIT = 1.1
"""How far the range reaches beyond the values seen: a cache of 8 bits has little room."""

HEADROOM_16BIT = 2.0
"""The same for a cache of 16 bits: one bit costs nothing there, a clipped key costs a token."""

_LEAST = 1 / 64  # of the mean range: a floor, so near-zero pairs are not amplified
_MAX_SHRUNK = 0.6  # least radius of a lattice point, relative to the pair's
_FINE = 20.0  # steps; above this radius lattice points lie densely enough for the bound below
_MIN_FINE = 0.93
_MIN_FOR_ADAPTERS = 0.95  # of the best factor

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AlignedHead:
    """The transform of a head, and the grid of its rows in the cache.

    Attributes:
        pairs: factor times cosine and sine of the turn of each pair of keys, `[R/2, 2]`.
        rest: factors of the elements of keys that are not rotated, `[D - R]`.
        turn: pairs of unit vectors `[2 * k, D]`: after the Hadamard rotation, values are turned from the first of each
            pair to the second, one pair after another.
        steps: of keys and values in the cache, `[2]`.
    """

    pairs: Floats
    rest: Floats
    turn: Floats
    steps: Floats

    def keys(self, stored: Floats, *, inverse: bool = False) -> Floats:
        """Keys, or what computes them, `[D, ...]`; with `inverse`, queries."""
        half = len(self.pairs)
        shape = (half, *[1] * (stored.ndim - 1))
        scale = np.square(self.pairs).sum(axis=1, keepdims=True) if inverse else np.float32(1)
        cos, sin = (part.reshape(shape) for part in (self.pairs / scale).T)
        rest = (1 / self.rest if inverse else self.rest).reshape(-1, *shape[1:])
        first, second, others = stored[:half], stored[half : 2 * half], stored[2 * half :]
        return np.concatenate([cos * first - sin * second, sin * first + cos * second, rest * others])

    def cached(self, kind: Kind, rows: Floats) -> Floats:
        """Rows of keys or values in the cache after the transform, `[n, D]`."""
        return rows @ self.rotation if kind == "value" else self.keys(rows.T).T

    @property
    def rotation(self) -> Floats:
        """Of values, `[D, D]`: `values @ rotation`."""
        rotation: Doubles = hadamard(self.turn.shape[1]).astype(np.float64)
        for start, end in self.turn.astype(np.float64).reshape(-1, 2, self.turn.shape[1]):
            rotation = rotation @ turned(start, end).T
        return rotation.astype(np.float32)


AlignedHeads = Mapping[HeadNumber, AlignedHead]


def is_scaled(spec: DecoderSpec, view: View) -> bool:
    """Whether factors of keys or queries go into a tensor: into their norm, or into the projection of those without."""
    if view.layer is None:
        return False
    return view.role in (("q", "k") if spec.qk_norm_of(view.layer) is None else ("q_norm", "k_norm"))


class AlignedTransforms:
    """Folds aligned heads into the tensors of a decoder.

    A norm of queries and keys would undo a factor of the projection in front of it, so the factors go into the weights
    of the norm, and pairs are not turned.

    Args:
        spec: the decoder.
        heads: the transforms.
    """

    def __init__(self, spec: DecoderSpec, heads: AlignedHeads) -> None:
        self._spec = spec
        self._heads = heads

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor."""
        if view.role == "v" or is_scaled(self._spec, view):
            return None if view.role == "v" and self._spec.output_gates else Fold(out_map=partial(self._outputs, view))
        turns_back = view.role == "o" and view.is_matrix and not self._spec.output_gates
        return Fold(in_map=partial(self._inputs, view)) if turns_back else None

    def _outputs(self, view: View, stored: Floats) -> Floats:
        """Queries, keys or values `[heads * D, ...]`, or a norm; one of `[D]` if all heads share it."""
        spec, layer = self._spec, view.layer
        assert layer is not None, "heads are parts of layers"
        parts = stored.reshape(-1, spec.of_layer(layer).head_dim, *stored.shape[1:])
        queries = view.role in ("q", "q_norm")
        group = spec.group(layer) if queries and len(parts) == spec.heads else 1
        changed = []
        for number, part in enumerate(parts):
            head = self._heads[spec.cache_layer(layer), number // group]
            changed.append(head.rotation.T @ part if view.role == "v" else head.keys(part, inverse=queries))
        return np.concatenate(changed)

    def _inputs(self, view: View, stored: Floats) -> Floats:
        """Rows of o_proj, `[..., heads * D]`."""
        spec, layer = self._spec, view.layer
        assert layer is not None, "heads are parts of layers"
        columns, owner = stored.reshape(-1, spec.heads, spec.of_layer(layer).head_dim), spec.cache_layer(layer)
        rotations = np.stack([self._heads[owner, head // spec.group(layer)].rotation for head in range(spec.heads)])
        turned: Floats = np.einsum("ohd,hde->ohe", columns, rotations, optimize=True)
        return np.ascontiguousarray(turned).reshape(stored.shape)


def value_rotation(spec: DecoderSpec, head_dim: int) -> Floats:
    """What rotates the values of a head, `[D, D]`; the identity where gates of channels keep it from being undone."""
    return np.eye(head_dim, dtype=np.float32) if spec.output_gates else hadamard(head_dim)


def align(
    spec: DecoderSpec,
    reach: Mapping[HeadNumber, HeadRange],
    first: Mapping[KvTensor, Floats],
    limit: int,
    *,
    has_sink: bool,
    adapted: Sequence[Mapping[KvTensor, Floats]] = (),
) -> dict[HeadNumber, AlignedHead]:
    """The transforms of all heads.

    Args:
        spec: the decoder.
        reach: of all tokens but the first.
        first: keys and values of the first tokens, `[n, D]`.
        limit: the greatest integer of the cache.
        has_sink: whether the first tokens are a sink. Its first row is moved onto the grid, and the range covers the
            others; with 16 bits every row is close enough to the grid.
        adapted: keys and values of the first tokens with some adapters; those of a sink come close to a grid of 8 bits
            too.
    """
    aligned: dict[HeadNumber, AlignedHead] = {}
    most = _filled(limit)
    for layer in filter(spec.owns_cache, spec.attention_layers):
        everything: list[HeadRange] = []
        head_dim = spec.of_layer(layer).head_dim
        rotation = value_rotation(spec, head_dim)
        for head in range(spec.of_layer(layer).kv_heads):
            seen = reach[layer, head]
            for rows_by_tensor in (first, *adapted):
                key, value = (rows_by_tensor[KvTensor(layer, kind, head)][int(has_sink) :] for kind in KINDS)
                if len(key):
                    seen = seen.with_keys(key).with_values(np.abs(value @ rotation).max())
            everything.append(seen)
        for head, seen in enumerate(everything):
            key, value = (first[KvTensor(layer, kind, head)] for kind in KINDS)
            snaps = has_sink and limit < 256
            qk_norm = spec.qk_norm_of(layer)
            if qk_norm:  # pairs cannot be turned, and heads may share the weights of the norm
                shared = everything if qk_norm == "head" else [seen]
                straight = np.max([head_range.pairs[:, :1] for head_range in shared], axis=0)
                rest = np.max([head_range.rest for head_range in shared], axis=0)
                seen = replace(seen, pairs=np.repeat(straight, len(ANGLES), axis=1), rest=rest)
            rows = (
                [rows_by_tensor[KvTensor(layer, "key", head)][0] for rows_by_tensor in (first, *adapted)]
                if snaps
                else []
            )
            gains, rest = _gains(seen, [] if qk_norm else rows, limit)
            step = np.float32(1 / np.concatenate([np.hypot(*gains.T), rest]).mean())
            if snaps and adapted:
                value_rows = [rows_by_tensor[KvTensor(layer, "value", head)][0] for rows_by_tensor in adapted]
                turn, value_step = sink_rotations(seen.value, np.stack([value[0], *value_rows]), limit, most)
            else:
                turn, value_step = sink_rotation(seen.value, value[0] if snaps else None, head_dim, limit, most)
            aligned[layer, head] = AlignedHead(
                (gains * step).astype(np.float32),
                (rest * step).astype(np.float32),
                turn,
                np.array([step, value_step], np.float32),
            )
    return aligned


def cache_encodings(heads: AlignedHeads, dtype: KvDtype) -> dict[str, Encoding]:
    """The encodings of the cache that go with the transforms, by the name of the graph input."""
    zero_point = 128 if dtype == "u8" else 0
    return {
        KvTensor(layer, kind, number).past: Encoding(dtype, float(step), zero_point)
        for (layer, number), head in heads.items()
        for kind, step in zip(KINDS, head.steps, strict=True)
    }


def write_heads(heads: AlignedHeads, folder: Path) -> None:
    """Write the transforms to `HEADS_FILE`."""
    tensors = {
        f"{layer}.{number}.{field}": np.ascontiguousarray(getattr(head, field))
        for (layer, number), head in heads.items()
        for field in AlignedHead.__slots__
    }
    (folder / HEADS_FILE).write_bytes(encode_tensors(tensors))


def read_heads(path: Path, size: int) -> dict[HeadNumber, AlignedHead]:
    """Read the transforms of a bundle.

    Raises:
        BundleError: the file, of `size` bytes, is missing or damaged.
    """
    try:
        tensors = load(read_file(path, size))
        names = sorted({tuple(int(part) for part in name.split(".")[:2]) for name in tensors})
        return {
            (layer, number): AlignedHead(*(tensors[f"{layer}.{number}.{field}"] for field in AlignedHead.__slots__))
            for layer, number in names
        }
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BundleError(
            str(path), got=error, expected="the transforms of each head", fix="Export the bundle again."
        ) from None


def _filled(limit: int) -> float:
    """How many of `limit` steps the values seen may reach."""
    return limit / (HEADROOM_8BIT if limit < 256 else HEADROOM_16BIT)


def _gains(seen: HeadRange, rows: Sequence[Floats], limit: int) -> tuple[Doubles, Doubles]:
    """Steps for each unit of a key: with the cosine and sine of the turn for pairs, `[R/2, 2]`, and of the rest.

    Args:
        seen: what keys reach.
        rows: that of the sink, which is moved onto the grid, and with adapters, which come close; empty without a sink.
        limit: the greatest integer of the cache.
    """
    most = _filled(limit)
    least = max(_LEAST * float(np.concatenate([seen.pairs.min(axis=1), seen.rest]).mean()), 1e-30)
    pairs, half = np.empty((len(seen.pairs), 2)), len(seen.pairs)
    for number, reach in enumerate(np.maximum(seen.pairs, least)):
        best = int(reach.argmin())
        angle, gain = float(ANGLES[best]), most / float(reach[best])
        if rows:
            known_pairs = np.stack([row[[number, number + half]] for row in rows])
            angle, gain = _on_lattice(reach, known_pairs, angle, gain, limit)
        pairs[number] = gain * np.cos(angle), gain * np.sin(angle)
    rest: Doubles = most / np.maximum(seen.rest.astype(np.float64), least)
    if rows:
        steps = np.abs(rows[0][2 * half :]) * rest
        whole = np.minimum(np.floor(steps), limit)
        rest = np.where(whole > 0, rest * whole / np.maximum(steps, 1), rest)
    return pairs, rest


def _on_lattice(reach: Floats, rows: Floats, angle: float, gain: float, limit: int) -> tuple[float, float]:
    """The angle and the factor that put the first of some pairs `[n, 2]` on a lattice point; unchanged if its radius is
    below 1 step.

    Of the lattice points with about its radius, the one that loses the least range; with further pairs, of those that
    lose little the one that brings them closest to lattice points.
    """
    first, second = rows[0]
    radius = float(np.hypot(first, second))
    steps = radius * gain
    if steps < 1:
        return angle, gain
    axis = np.arange(min(int(steps), limit) + 1)
    across, up = (grid.ravel() for grid in np.meshgrid(axis, axis))
    norms = np.hypot(across, up)
    near = (norms <= steps) & (norms >= steps * (_MIN_FINE if steps > _FINE else _MAX_SHRUNK)) & (norms > 0)
    if not near.any():
        return angle, gain
    across, up, norms = across[near], up[near], norms[near]
    turns = (np.arctan2(up, across) - np.arctan2(second, first)) % (np.pi / 2)
    reached = np.interp(turns, np.append(ANGLES, np.pi / 2), np.append(reach, reach[0]))
    gains = norms / radius
    gains[reached * gains > _filled(limit) * 1.01] = 0
    best = int(gains.argmax())
    if not gains[best]:
        return angle, gain
    if len(rows) > 1:
        close = np.flatnonzero(gains >= _MIN_FOR_ADAPTERS * gains[best])
        cos, sin = gains[close] * np.cos(turns[close]), gains[close] * np.sin(turns[close])
        x, y = rows[1:].T[..., None]
        steps = np.stack([cos * x - sin * y, sin * x + cos * y])
        errors = np.square((steps - np.rint(steps)) / gains[close]).sum(axis=(0, 1))
        best = int(close[errors.argmin()])
    return float(turns[best]), float(gains[best])
