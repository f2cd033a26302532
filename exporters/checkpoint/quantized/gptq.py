"""GPTQ: integers packed along the inputs, as AutoGPTQ, GPTQModel and optimum write them.

`qweight` is int32 `[in * bits / 32, out]`, `scales` `[groups, out]`, `qzeros` int32 `[groups, out * bits / 32]`, and
`g_idx` the group of each input. Zero points of the first version of the format are stored less 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import Config
from exporters.checkpoint.quantized.matrix import (
    Floats,
    IntegerMatrix,
    Integers,
    Rows,
    centred,
    check_groups,
    check_shape,
    unpack,
)
from exporters.checkpoint.quantized.modules import in_groups, read_group, read_words, with_matrices
from exporters.checkpoint.stored import Stored, StoredTensor

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True, eq=False)
class GptqMatrix(IntegerMatrix):
    """A matrix as GPTQ stores it; see the module.

    Attributes:
        file: where the integers are stored.
        shape: `[out, in]`.
        bits: of an integer.
        qweight: the integers.
        qzeros: zero points.
        scale: scales.
        order: the group of each input, unless groups are neighbours of equal size.
        stored_less: what is subtracted from stored zero points.
    """

    file: Path
    shape: tuple[int, ...]
    bits: int
    qweight: StoredTensor
    qzeros: StoredTensor
    scale: StoredTensor
    order: NDArray[np.int64] | None
    stored_less: int

    def integers(self, rows: Rows) -> Integers:
        return centred(unpack(self.qweight.open()[:, rows].T, self.bits), self.bits)

    def scales(self, rows: Rows) -> Floats:
        found: Floats = np.ascontiguousarray(self.scale.open()[:, rows].T, np.float32)
        return found

    def zero_points(self, rows: Rows) -> Integers:
        stored = unpack(self.qzeros.open(), self.bits)[:, rows]
        zeros = (stored.astype(np.int16) + np.int16(self.stored_less)) & np.int16((1 << self.bits) - 1)
        return np.ascontiguousarray(zeros.T - np.int16(1 << (self.bits - 1)))

    def group_of(self) -> NDArray[np.int64] | None:
        return self.order


@dataclass(frozen=True, slots=True)
class Gptq:
    """How a checkpoint was quantized with GPTQ.

    Attributes:
        name: for reports.
        bits: of an integer.
        group: inputs of a group; None for all.
        stored_less: what is subtracted from stored zero points.
    """

    name: str
    bits: int
    group: int | None
    stored_less: int

    @classmethod
    def of(cls, config: Config) -> Gptq:
        """Read `quantization_config`.

        Raises:
            CheckpointError: other bits than 4 and 8, or another format.
        """
        bits, group = read_bits(config), read_group(config)
        form = config.text("checkpoint_format", "gptq")
        if form not in _STORED_LESS or config.flag("is_marlin_format"):
            raise config.refusal(
                "checkpoint_format" if form not in _STORED_LESS else "is_marlin_format",
                " or ".join(_STORED_LESS),
                fix="Take the checkpoint in GPTQ's own format, or the one before quantization.",
            )
        return cls(f"gptq, int{bits}{in_groups(group)}", bits, group, _STORED_LESS[form])

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
        """The tensors with each matrix under the name that it has unquantized.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """
        return with_matrices(tensors, self._matrix, ".g_idx")

    def _matrix(self, module: str, tensors: Mapping[str, StoredTensor]) -> GptqMatrix:
        qweight, in_word = read_words(module, tensors), 32 // self.bits
        inputs, outputs = qweight.shape[0] * in_word, qweight.shape[1]
        groups = 1 if self.group is None else -(-inputs // self.group)
        scales = check_shape(f"{module}.scales", tensors.get(f"{module}.scales"), (groups, outputs))
        key = f"{module}.qzeros"
        qzeros = check_shape(key, tensors.get(key), (groups, -(-outputs // in_word)), "words")
        order = np.arange(inputs) // (self.group or inputs)
        neighbours = groups == 1 or inputs % (self.group or inputs) == 0
        if (stored := tensors.get(f"{module}.g_idx")) is not None:
            given = check_groups(f"{module}.g_idx", stored, inputs, groups)
            neighbours &= bool(np.array_equal(given, order))
            order = given
        shape, kept = (outputs, inputs), None if neighbours else order
        return GptqMatrix(qweight.file, shape, self.bits, qweight, qzeros, scales, kept, self.stored_less)


def read_bits(config: Config) -> int:
    """`bits`.

    Raises:
        CheckpointError: neither 4 nor 8.
    """
    if (bits := config.size("bits")) not in (4, 8):
        raise config.refusal("bits", "4 or 8", fix="Take the checkpoint before quantization, or one of 4 or 8 bits.")
    return bits
