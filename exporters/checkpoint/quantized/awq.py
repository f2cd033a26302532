"""AWQ in the packing of its matrix product (`gemm`), as AutoAWQ writes it.

`qweight` is int32 `[in, out / 8]`, `scales` `[groups, out]`, and `qzeros` int32 `[groups, out / 8]`. The eight outputs
of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import Config
from exporters.checkpoint.quantized.matrix import (
    Floats,
    IntegerMatrix,
    Integers,
    Rows,
    centred,
    check_shape,
    unpack,
    unreadable,
)
from exporters.checkpoint.quantized.modules import in_groups, read_group, read_words, with_matrices
from exporters.checkpoint.stored import Stored, StoredTensor

BITS = 4
_IN_WORD = 32 // BITS
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of the outputs of a word among its nibbles


@dataclass(frozen=True, slots=True)
class AwqMatrix(IntegerMatrix):
    """A matrix as AWQ stores it; see the module.

    Attributes:
        file: where the integers are stored.
        shape: `[out, in]`.
        qweight: the integers.
        qzeros: zero points.
        scale: scales.
        bits: of an integer.
    """

    file: Path
    shape: tuple[int, ...]
    qweight: StoredTensor
    qzeros: StoredTensor
    scale: StoredTensor
    bits: int = BITS

    def integers(self, rows: Rows) -> Integers:
        wanted = np.arange(self.shape[0])[rows]
        words = slice(int(wanted.min()) // _IN_WORD, int(wanted.max()) // _IN_WORD + 1)
        unpacked = _unpack(self.qweight.open()[:, words])
        return np.ascontiguousarray(centred(unpacked[:, wanted - words.start * _IN_WORD].T, BITS))

    def scales(self, rows: Rows) -> Floats:
        found: Floats = np.ascontiguousarray(self.scale.open()[:, rows].T, np.float32)
        return found

    def zero_points(self, rows: Rows) -> Integers:
        return np.ascontiguousarray(centred(_unpack(self.qzeros.open())[:, rows].T, BITS))

    def group_of(self) -> NDArray[np.int64] | None:
        return None


@dataclass(frozen=True, slots=True)
class Awq:
    """How a checkpoint was quantized with AWQ.

    Attributes:
        name: for reports.
        group: inputs of a group; None for all.
    """

    name: str
    group: int | None

    @classmethod
    def of(cls, config: Config) -> Awq:
        """Read `quantization_config`.

        Raises:
            CheckpointError: other bits than 4, or another packing than gemm.
        """
        if (bits := config.size("bits", BITS)) != BITS:
            raise config.refusal("bits", str(BITS), got=str(bits), fix="Take the checkpoint before quantization.")
        if (version := config.text("version", "gemm")).lower() != "gemm":
            fix = "Take the checkpoint packed for gemm, which is AWQ's default, or the one before quantization."
            raise config.refusal("version", "gemm", got=repr(version)[:80], fix=fix)
        group = read_group(config)
        return cls(f"awq, int{BITS}{in_groups(group)}", group)

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
        """The tensors with each matrix under the name that it has unquantized.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """
        return with_matrices(tensors, self._matrix)

    def _matrix(self, module: str, tensors: Mapping[str, StoredTensor]) -> AwqMatrix:
        qweight = read_words(module, tensors)
        inputs, words = qweight.shape
        if self.group is not None and inputs % self.group:
            raise unreadable(f"{module}.qweight", f"a multiple of {self.group} inputs", qweight)
        groups = 1 if self.group is None else inputs // self.group
        scales = check_shape(f"{module}.scales", tensors.get(f"{module}.scales"), (groups, words * _IN_WORD))
        qzeros = check_shape(f"{module}.qzeros", tensors.get(f"{module}.qzeros"), (groups, words), "words")
        return AwqMatrix(qweight.file, (words * _IN_WORD, inputs), qweight, qzeros, scales)


def _unpack(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Nibbles of the last axis, in the order of the outputs."""
    nibbles = unpack(words, BITS)
    found: NDArray[np.uint8] = nibbles.reshape(*words.shape, _IN_WORD)[..., _PLACES].reshape(nibbles.shape)
    return found
