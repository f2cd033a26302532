"""Pixels of a tile as the inputs of an encoder's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import COS_PORT, PADDING_PORT, PIXELS_PORT, PLACES_PORT, SIN_PORT, EncoderSpec, PictureSpec
from quant import Encoding

_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """A tile as an encoder reads it.

    Attributes:
        patches: channels, rows and columns of each, `[patches, 3 * patch**2]`, and zeros for a class.
        slots: where each stands in the input of a graph.
        places: how much of each row of the table of positions a patch gets, `[patches, table_side**2]`; None without
            a table.
        turns: cosines and sines of the rotary embedding of each patch, `[patches, head_dim]`; the first half of the
            sines is negative. None without one.
    """

    patches: _Floats
    slots: NDArray[np.int64]
    places: _Floats | None = None
    turns: tuple[_Floats, _Floats] | None = None

    def output_rows(self, spec: EncoderSpec) -> NDArray[np.int64]:
        """Where each row of the tile stands in the output of a graph."""
        first: NDArray[np.int64] = self.slots[: len(self.slots) - spec.has_class : spec.merged] // spec.merged
        return first


def block_order(rows: int, columns: int, merge: int) -> NDArray[np.int64]:
    """Patches, numbered row by row, in the order of an encoder's inputs: square by square of those merged."""
    numbers = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return numbers.transpose(0, 2, 1, 3).reshape(-1)


def normalized(pixels: NDArray[np.uint8], pictures: PictureSpec) -> _Floats:
    """Pixels `[H, W, 3]` as the encoder was trained on them, in the order of transformers' operations."""
    values = pixels.astype(np.float32) * np.float32(1 / 255)
    scaled: _Floats = (values - np.array(pictures.mean, np.float32)) / np.array(pictures.deviation, np.float32)
    return scaled


def encoder_inputs(pixels: NDArray[np.uint8], spec: EncoderSpec, pictures: PictureSpec) -> EncoderInputs:
    """A tile `[height, width, 3]`, whole patches, as the inputs of an encoder, without those that are no patches."""
    rows, columns = (edge // spec.patch for edge in pixels.shape[:2])
    values = normalized(pixels, pictures).reshape(rows, spec.patch, columns, spec.patch, 3)
    patches: NDArray[Any] = values.transpose(0, 2, 4, 1, 3).reshape(rows * columns, spec.patch_values)
    order = block_order(rows, columns, spec.merge)
    inputs = np.zeros((len(patches) + spec.has_class, spec.patch_values), np.float32)
    inputs[: len(patches)] = patches[order]
    slots = _window_slots(rows // spec.merge, columns // spec.merge, spec) if spec.window else np.arange(len(inputs))
    if not spec.has_shapes:
        return EncoderInputs(inputs, slots)
    turns = None if spec.rotary_theta is None else _turns(rows, columns, spec.head_dim, spec.rotary_theta, order)
    if not spec.has_table:
        return EncoderInputs(inputs, slots, None, turns)
    if spec.interpolation == "summed":
        table = np.eye(spec.table_side, dtype=np.float32)
        down_at, across_at = np.divmod(order, columns)
        return EncoderInputs(inputs, slots, np.concatenate([table[across_at], table[down_at]], axis=1), turns)
    weights = _antialiased if spec.interpolation == "antialiased" else _between_corners
    down, across = (weights(edge, spec.table_side) for edge in (rows, columns))
    places = down[:, None, :, None] * across[None, :, None, :]
    return EncoderInputs(inputs, slots, places.reshape(rows * columns, -1)[order], turns)


def _window_slots(rows: int, columns: int, spec: EncoderSpec) -> NDArray[np.int64]:
    """The place of each patch of a grid of merged squares: window by window, each padded to a full one."""
    edge = spec.window
    down, across = np.divmod(np.arange(rows * columns), columns)
    windows = down // edge * -(-columns // edge) + across // edge
    squares = windows * edge**2 + down % edge * edge + across % edge
    slots: NDArray[np.int64] = (squares[:, None] * spec.merged + np.arange(spec.merged)).reshape(-1)
    return slots


def _turns(rows: int, columns: int, head_dim: int, theta: float, order: NDArray[np.int64]) -> tuple[_Floats, _Floats]:
    """Of a rotary embedding whose first pairs turn with the row of a patch, and the others with its column."""
    frequencies = theta ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    down, across = np.divmod(np.arange(rows * columns)[order], columns)
    angles = np.concatenate([down[:, None] * frequencies, across[:, None] * frequencies], axis=1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)


def _between_corners(size: int, table: int) -> _Floats:
    """How much of each of `table` points each of `size` has, bilinear: the first and the last are the table's."""
    places = np.linspace(0, table - 1, size, dtype=np.float32)
    weights: _Floats = np.maximum(1 - np.abs(np.arange(table, dtype=np.float32) - places[:, None]), 0)
    return weights


def _antialiased(size: int, table: int) -> _Floats:
    """How much of each of `table` points each of `size` has, bilinear with antialiasing as PyTorch does it."""
    scale = table / size
    centers = (np.arange(size) + 0.5) * scale - 0.5
    weights = np.maximum(1 - np.abs(np.arange(table) - centers[:, None]) / max(scale, 1), 0)
    resampling: _Floats = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return resampling


def graph_inputs(
    inputs: EncoderInputs, spec: EncoderSpec, encodings: Mapping[str, Encoding]
) -> dict[str, NDArray[Any]]:
    """What an encoder's graph reads of a tile, by input; no patch sees the inputs behind those of the tile."""
    slots, shapes = inputs.slots, spec.input_shapes
    values = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    values[PIXELS_PORT][0, 0, slots] = inputs.patches
    if spec.has_shapes:
        values[PADDING_PORT][:] = -np.inf
        values[PADDING_PORT][..., slots] = 0
    if inputs.places is not None:
        values[PLACES_PORT][0, 0, slots] = inputs.places
    if inputs.turns is not None:
        for port, turns in zip((COS_PORT, SIN_PORT), inputs.turns, strict=True):
            values[port][0, 0, slots] = turns
    return {name: encodings[name].quantize(array) for name, array in values.items()}
