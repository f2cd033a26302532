"""Float8 (e4m3) with a scale for each block of a matrix, as DeepSeek and Qwen publish, for each row, or for all.

`weight_scale_inv` `[out / 128, in / 128]`, or `weight_scale`, multiplies `weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgekv.spec import Config
from exporters.checkpoint.quantized.matrix import QuantizedMatrix, float8_matrix, read_block, unreadable
from exporters.checkpoint.stored import Stored, StoredTensor

_SCALES = (".weight_scale_inv", ".weight_scale")
_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Scales of activations, which edgekv observes itself."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """How a checkpoint was quantized to float8.

    Attributes:
        name: for reports.
        block: rows and columns that share a scale; None for one scale, or one for each row.
    """

    name: str
    block: tuple[int, int] | None

    @classmethod
    def of(cls, config: Config) -> Fp8:
        """Read `quantization_config`.

        Raises:
            CheckpointError: another type than e4m3.
        """
        if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise config.refusal("fmt", "e4m3", fix="Take the checkpoint before quantization.")
        if "weight_block_size" not in config:
            return cls("float8", None)
        height, width = block = read_block(config, "weight_block_size")
        return cls(f"float8 in blocks of {height} x {width}", block)

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
        """The tensors with each matrix as one.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """
        scales = {key: key.rsplit(".", 1)[0] for key in tensors if key.endswith(_SCALES)}
        found: dict[str, Stored] = {
            key: tensor for key, tensor in tensors.items() if key not in scales and not key.endswith(_ACTIVATIONS)
        }
        return found | {f"{module}.weight": self._matrix(module, key, tensors) for key, module in scales.items()}

    def _matrix(self, module: str, key: str, tensors: Mapping[str, StoredTensor]) -> QuantizedMatrix:
        values = tensors.get(f"{module}.weight")
        if values is None or len(values.shape) != 2 or values.dtype.name != "float8_e4m3fn":
            raise unreadable(f"{module}.weight", "a matrix of float8 (e4m3)", values)
        return float8_matrix(values, key, tensors[key], self.block)
