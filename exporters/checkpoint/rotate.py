"""A rotation of the residual stream, folded into the weights: the same model, easier to quantize.

RMSNorm without its weights commutes with a rotation, so the weights of each norm are folded into the following
matrices, an orthogonal R into all matrices that write to the residual, and its inverse into all that read from it
(QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). Outliers of single channels are spread over all channels, and nothing
is added to the graph.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import RotationName
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.tensors import EMBEDDING, HEAD
from exporters.checkpoint.checkpoint import EVERY, Rows
from exporters.quantize.reference import Tensors

_NORM = re.compile(r"(model\.layers\.\d+\.(input|post_attention)_layernorm|model\.norm)\.weight")
_WRITER = re.compile(r"model\.layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.(weight|bias)")
_READER = re.compile(r"(model\.layers\.\d+\.)(self_attn\.[qkv]|mlp\.(?:gate|up))_proj\.weight")


def applied_rotation(spec: DecoderSpec, asked: RotationName) -> RotationName:
    """The rotation that a decoder supports: none if the outputs of its layers are normalized (Gemma)."""
    return "none" if spec.post_norms else asked


class RotatedCheckpoint:
    """The tensors of a checkpoint with its residual stream rotated."""

    def __init__(self, checkpoint: Tensors) -> None:
        if checkpoint.spec.post_norms:
            raise ValueError("checkpoint: got norms behind its layers; expected a residual that can be rotated")
        self._checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.head_key = checkpoint.head_key
        self._factors = hadamard_factors(self.spec.hidden)

    def tensor(self, key: str, rows: Rows = EVERY) -> NDArray[np.float32]:
        """As `Checkpoint.tensor`."""
        if _NORM.fullmatch(key):
            return np.ones_like(self._checkpoint.tensor(key, rows))
        if _WRITER.fullmatch(key):
            stored = self._checkpoint.tensor(key)
            rotated: NDArray[np.float32] = self._rotate(stored.T).T[rows]
            return rotated
        stored = self._checkpoint.tensor(key, rows)
        if key == EMBEDDING:
            return self._rotate(stored)
        if (norm := self._norm_before(key)) is None:
            return stored
        stored *= self._checkpoint.tensor(norm)
        return self._rotate(stored)

    def _rotate(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """`vectors @ R`, one factor of R at a time, which needs far fewer products."""
        shape, behind = vectors.shape, 1
        for factor in reversed(self._factors):
            before = vectors.reshape(-1, len(factor), behind)
            vectors = (before[..., 0] @ factor)[..., None] if behind == 1 else factor.T @ before
            behind *= len(factor)
        return vectors.reshape(shape)

    def _norm_before(self, key: str) -> str | None:
        if key == HEAD:
            return "model.norm.weight"
        reader = _READER.fullmatch(key)
        if reader is None:
            return None
        norm = "input_layernorm" if reader[2].startswith("self_attn") else "post_attention_layernorm"
        return f"{reader[1]}{norm}.weight"


def rotated(checkpoint: Tensors, rotation: RotationName) -> Tensors:
    """The checkpoint with this rotation of its residual stream."""
    return checkpoint if rotation == "none" else RotatedCheckpoint(checkpoint)


def hadamard(size: int) -> NDArray[np.float32]:
    """An orthogonal matrix of few distinct magnitudes: Sylvester's for the power of two in `size`, the discrete cosine
    transform for the odd rest.
    """
    matrix = np.ones((1, 1))
    for factor in hadamard_factors(size):
        matrix = np.kron(matrix, factor)
    return _float32(matrix)


def hadamard_factors(size: int) -> list[NDArray[np.float32]]:
    """The matrices whose Kronecker product is `hadamard(size)`, of powers of two up to 64, then the odd rest."""
    power = size & -size
    factors = [_float32(_cosines(size // power))] if size > power else []
    while power > 1:
        part = min(power, 64)
        factors.insert(0, _sylvester(part))
        power //= part
    return factors


def _sylvester(size: int) -> NDArray[np.float32]:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return _float32(matrix / np.sqrt(size))


def _cosines(size: int) -> NDArray[np.float64]:
    rows = np.arange(size)[:, None]
    matrix: NDArray[np.float64] = np.sqrt(2 / size) * np.cos(np.pi / size * rows * (np.arange(size) + 0.5))
    matrix[0] = np.sqrt(1 / size)
    return matrix


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32, copy=False)
