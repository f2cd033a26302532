"""A rotation of the residual, folded into the weights: the same model, easier to quantize.

RMSNorm without its weights commutes with a rotation. So the weights of each norm go into the matrices that read it, an
orthogonal R into all matrices that write the residual, and its inverse into all that read it (QuaRot, Ashkboos et al.
2024, arXiv 2404.00456). Outliers of single channels spread over all channels, and graphs get no new operation.

A Hadamard matrix makes all input channels of a matrix alike. `principal` sorts them instead: the first channels are the
directions in which weights that read the residual are large, the last those in which they are small, and a Hadamard
matrix mixes each 64 neighbours alone. So the blocks of a matrix with block scales differ in magnitude, and each has
steps of its own. Weights are small where inputs are large, so large errors meet small inputs.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import RotationName
from edgekv.spec import FINAL_NORM, DecoderSpec, View, Vocabulary, by_inputs, by_outputs, views
from exporters.checkpoint.fold import EVERY, Floats, Fold, Read
from quant.products import one_thread, product

_MIXED = 64  # at most: neighbouring directions that are channels together; the blocks of most types


def applied_rotation(spec: DecoderSpec, asked: RotationName) -> RotationName:
    """The rotation that a decoder can have: none if the outputs of its blocks are normalized (Gemma, OLMo 2)."""
    return "none" if spec.post_norms else asked


def shared_vocabulary(rotation: RotationName) -> Vocabulary:
    """How a tied head shares its matrix: the weights of the last norm cannot be folded into the embeddings too."""
    return "shared" if rotation == "none" else "turned"


class ResidualRotation:
    """Folds norms and a rotation of the residual into the tensors of a decoder without post-norms.

    A head that shares its matrix E R with the embeddings reads norms whose weights g are not in it: of a rotated row
    x R it needs x g E^T = (x R) M (E R)^T, with M = R^T diag(g) R. M is the root mean square of g, which the last norm
    has as its weights, times the identity and a small matrix, the turn.

    Args:
        spec: the decoder.
        read: the tensors before, by name and rows.
        name: `hadamard` or `principal`.
        directions: of `principal`; None to compute them.
    """

    def __init__(self, spec: DecoderSpec, read: Read, name: RotationName, directions: Floats | None = None) -> None:
        self._spec = spec
        self._read = read
        self._name = name
        self._given = directions

    @cached_property
    def directions(self) -> Floats | None:
        """`[hidden, hidden]`, R, if it depends on the weights."""
        if self._name != "principal":
            return None
        return principal_directions(self._spec, self._read) if self._given is None else self._given

    @cached_property
    def _factors(self) -> list[Floats]:
        return hadamard_factors(self._spec.hidden)

    def __call__(self, view: View) -> Fold | None:
        """The fold of a tensor. Weights of norms become 1; those of the last one the head's gain, if it is turned."""
        if view.role == "turn":
            return Fold(out_map=lambda _: self._turn())
        if view.role == "norm":
            gain = self._head_gain() if (view.name, self._spec.vocabulary) == (FINAL_NORM, "turned") else np.float32(1)
            return Fold(out_map=lambda norm: np.full_like(norm, gain))
        if view.writes_residual:
            return Fold(out_map=self.writing)
        if view.norm is not None:
            return Fold(in_map=partial(self._reading, view.norm))
        return Fold(in_map=self.rotated) if view.is_matrix and view.role in ("embedding", "head") else None

    def _head_gain(self) -> np.float32:
        weights: np.float32 = np.sqrt(np.mean(np.square(self._read(FINAL_NORM, EVERY))))
        return weights or np.float32(1)

    def _turn(self) -> Floats:
        """`[hidden, hidden]`, symmetric: M over the head's gain, less the identity."""
        weights = self._read(FINAL_NORM, EVERY)
        scaled: Floats = self.writing(self.rotated(np.diag(weights / self._head_gain())))
        return scaled - np.eye(len(weights), dtype=np.float32)

    def writing(self, matrix: Floats) -> Floats:
        """A matrix `[hidden, ...]` whose results are rotated."""
        return by_outputs(self.rotated(by_inputs(matrix)))

    def _reading(self, norm: str, matrix: Floats) -> Floats:
        """A matrix `[..., hidden]` that reads the rotated result of a norm, whose weights go into it, in place."""
        matrix *= self._read(norm, EVERY)
        return self.rotated(matrix)

    def rotated(self, vectors: Floats) -> Floats:
        """`vectors @ R`; of a Hadamard matrix one factor at a time, which needs far fewer products."""
        shape, behind = vectors.shape, 1
        if self.directions is not None:
            return product(vectors.reshape(-1, shape[-1]), self.directions).reshape(shape)
        for factor in reversed(self._factors):
            before = vectors.reshape(-1, len(factor), behind)
            vectors = (before[..., 0] @ factor)[..., None] if behind == 1 else factor.T @ before
            behind *= len(factor)
        return vectors.reshape(shape)


@one_thread()
def principal_directions(spec: DecoderSpec, read: Read) -> Floats:
    """`[hidden, hidden]`, orthogonal: the columns are directions of the residual, those of large weights first.

    They are eigenvectors of the covariance of all weights of the layers that read the residual, each matrix divided by
    its root mean square.

    Args:
        spec: the decoder.
        read: its exact tensors, by name and rows.
    """
    size = spec.hidden
    covariance = np.zeros((size, size))
    for view in views(spec):
        if view.layer is not None and view.norm is not None and view.is_matrix:
            weights = read(view.name, EVERY) * read(view.norm, EVERY)
            own = product(weights.T, weights).astype(np.float64)
            covariance += own * (weights.size / max(np.trace(own), float(np.finfo(np.float32).tiny)))
    _, ascending = np.linalg.eigh(covariance)
    vectors = np.ascontiguousarray(ascending[:, ::-1])
    mixed = hadamard(min(size & -size, _MIXED))
    rotated: Floats = (vectors.reshape(size, -1, len(mixed)) @ mixed).reshape(size, size).astype(np.float32)
    return rotated


@lru_cache(maxsize=8)  # the widths of a model's heads
def hadamard(size: int) -> NDArray[np.float32]:
    """An orthogonal matrix of few distinct magnitudes: Sylvester's matrix for the power of two in `size`, times the
    discrete cosine transform for the odd rest. It cannot be written to.
    """
    matrix = np.ones((1, 1))
    for factor in hadamard_factors(size):
        matrix = np.kron(matrix, factor)
    rotation = _float32(matrix)
    rotation.flags.writeable = False
    return rotation


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
