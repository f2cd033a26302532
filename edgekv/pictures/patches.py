"""Pixels of a tile as the inputs of an encoder's graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import EncoderSpec, PictureSpec


def block_order(spec: EncoderSpec) -> NDArray[np.int64]:
    """The patches, numbered row by row, in the order of an encoder's inputs: square by square of those merged."""
    blocks = spec.side // spec.merge
    numbers = np.arange(spec.patches).reshape(blocks, spec.merge, blocks, spec.merge)
    return numbers.transpose(0, 2, 1, 3).reshape(-1)


def normalized(pixels: NDArray[np.uint8], pictures: PictureSpec) -> NDArray[np.float32]:
    """Pixels `[H, W, 3]` as the encoder was trained on them, in the order of transformers' operations."""
    values = pixels.astype(np.float32) * np.float32(1 / 255)
    found: NDArray[np.float32] = (values - np.array(pictures.mean, np.float32)) / np.array(
        pictures.deviation, np.float32
    )
    return found


def patches_of(pixels: NDArray[np.uint8], spec: EncoderSpec, pictures: PictureSpec) -> NDArray[np.float32]:
    """A tile `[image, image, 3]` as the inputs of an encoder, `[inputs, 3 * patch**2]`: channels, rows, columns."""
    values = normalized(pixels, pictures).reshape(spec.side, spec.patch, spec.side, spec.patch, 3)
    patches: NDArray[Any] = values.transpose(0, 2, 4, 1, 3).reshape(spec.patches, spec.patch_values)
    inputs = np.zeros((spec.inputs, spec.patch_values), np.float32)
    inputs[: spec.patches] = patches[block_order(spec)]
    return inputs
