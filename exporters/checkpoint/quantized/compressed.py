"""compressed-tensors, as llm-compressor writes it: packed integers, whole bytes, or float8.

`weight_packed` is int32 `[out, in * bits / 32]`, `weight_scale` `[out, groups]`, and `weight_zero_point` int32
`[out * bits / 32, groups]`. Matrices of whole bytes are stored as `weight`, with zero points of a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgekv.spec import Config
from exporters.checkpoint.quantized.matrix import (
    Floats,
    IntegerMatrix,
    Integers,
    QuantizedMatrix,
    Rows,
    centred,
    check_groups,
    check_kind,
    check_shape,
    float8_matrix,
    read_block,
    unpack,
    unreadable,
)
from exporters.checkpoint.quantized.modules import in_groups
from exporters.checkpoint.stored import Stored, StoredTensor

_T = TypeVar("_T", bound=np.generic)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_PARTS = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale")
"""Scales of activations, which edgekv observes itself."""
_FIX = "Take the checkpoint before quantization, or one in another of these."


@dataclass(frozen=True, slots=True, eq=False)
class CompressedMatrix(IntegerMatrix):
    """A matrix of packed integers, or of whole bytes.

    Attributes:
        file: where the integers are stored.
        shape: `[out, in]`.
        bits: of an integer.
        values: int32 if packed, else int8.
        scale: scales.
        zeros: zero points; None if all are 0.
        order: the group of each input, unless groups are neighbours of equal size.
    """

    file: Path
    shape: tuple[int, ...]
    bits: int
    values: StoredTensor
    scale: StoredTensor
    zeros: StoredTensor | None
    order: NDArray[np.int64] | None

    def integers(self, rows: Rows) -> Integers:
        stored = self.values.open()[rows]
        if self.values.dtype == np.int8:
            return stored.astype(np.int16)
        return np.ascontiguousarray(centred(unpack(stored, self.bits)[:, : self.shape[1]], self.bits))

    def scales(self, rows: Rows) -> Floats:
        return self._of_rows(self.scale.open().astype(np.float32))[rows]

    def zero_points(self, rows: Rows) -> Integers | None:
        if self.zeros is None:
            return None
        stored = self.zeros.open()
        if self.zeros.dtype != np.int32:
            return self._of_rows(stored.astype(np.int16))[rows]
        return np.ascontiguousarray(centred(unpack(stored.T, self.bits)[:, : self.shape[0]].T[rows], self.bits))

    def group_of(self) -> NDArray[np.int64] | None:
        return self.order

    def _of_rows(self, values: NDArray[_T]) -> NDArray[_T]:
        """`[out, groups]`; one value stands for all."""
        if values.ndim == 2 and len(values) == self.shape[0]:
            return values
        return np.broadcast_to(values.reshape(-1, 1), (self.shape[0], 1))


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Weights of a group of modules.

    Attributes:
        bits: of an integer, or of a float.
        floats: whether weights are float8.
        symmetric: whether all zero points are 0.
        block: rows and columns that share a scale, if both are bounded.
        group: inputs that share a scale.
    """

    bits: int
    floats: bool
    symmetric: bool
    block: tuple[int, int] | None
    group: int | None

    @classmethod
    def of(cls, config: Config) -> _Scheme:
        """Read `weights` of an entry of `config_groups`."""
        kind, bits = config.text("type", "int"), config.size("num_bits", 8)
        if kind not in ("int", "float"):
            raise config.refusal("type", "int or float", fix=_FIX)
        if bits not in ((4, 8) if kind == "int" else (8,)):
            raise config.refusal("num_bits", "4 or 8 with int, 8 with float", got=f"{bits} with {kind}", fix=_FIX)
        group = config.optional_size("group_size")
        strategy = config.text("strategy", "group" if group else "tensor")
        if strategy not in ("tensor", "channel", "group", "block"):
            raise config.refusal("strategy", "tensor, channel, group or block", fix=_FIX)
        block = None
        if strategy == "block":
            block = read_block(config, "block_structure")
        symmetric = config.flag("symmetric", True)
        return cls(bits, kind == "float", symmetric, block, group if strategy == "group" else None)

    def groups(self, inputs: int) -> int:
        """Scales of an output channel."""
        return 1 if self.group is None else -(-inputs // self.group)

    @property
    def name(self) -> str:
        if self.floats:
            return "float8"
        return f"int{self.bits}{in_groups(self.group)}"


@dataclass(frozen=True, slots=True)
class Compressed:
    """How a checkpoint was quantized with compressed-tensors.

    Attributes:
        name: for reports.
        schemes: of the groups of modules.
    """

    name: str
    schemes: tuple[_Scheme, ...]

    @classmethod
    def of(cls, config: Config) -> Compressed:
        """Read `quantization_config`.

        Raises:
            CheckpointError: a format, type or number of bits that cannot be read.
        """
        groups = config.table("config_groups")
        tables = [groups.table(name) for name in groups.names]
        for table in (config, *tables):
            if "format" in table and table.text("format") not in _FORMATS:
                raise table.refusal("format", " or ".join(_FORMATS), fix=_FIX)
        if config.table("transform_config").names:
            fix = "Take the checkpoint before quantization: its weights are rotated, which its activations must follow."
            raise config.refusal("transform_config", "none", fix=fix)
        if config.table("sparsity_config").text("format", "dense") != "dense":
            raise config.refusal("sparsity_config", "none", fix=_FIX)
        schemes = tuple(dict.fromkeys(_Scheme.of(table.table("weights")) for table in tables if "weights" in table))
        if not schemes:
            raise config.refusal("config_groups", "a group of modules with weights")
        return cls(f"compressed-tensors, {' and '.join(each.name for each in schemes)}", schemes)

    def matrices(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stored]:
        """The tensors with each matrix under the name that it has unquantized.

        Raises:
            CheckpointError: a part of a matrix is missing or of another shape.
        """
        modules = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
        parts = {module + part for module in modules for part in _PARTS}
        found: dict[str, Stored] = {
            key: tensor for key, tensor in tensors.items() if key not in parts and not key.endswith(_ACTIVATIONS)
        }
        return found | {f"{module}.weight": self._matrix(module, tensors) for module in modules}

    def _matrix(self, module: str, tensors: Mapping[str, StoredTensor]) -> QuantizedMatrix:
        scale, packed = tensors[f"{module}.weight_scale"], tensors.get(f"{module}.weight_packed")
        if packed is not None:
            return self._packed(module, tensors, packed)
        values = tensors.get(f"{module}.weight")
        if values is None or len(values.shape) != 2 or values.dtype.itemsize != 1:
            raise unreadable(f"{module}.weight", "a matrix of integers or floats of 8 bits", values)
        floats = values.dtype != np.int8
        scheme = self._scheme(
            f"{module}.weight", values.shape[1], scale, lambda each: each.floats == floats and each.bits == 8
        )
        if floats:
            return float8_matrix(values, f"{module}.weight_scale", scale, scheme.block)
        return self._integers(module, tensors, (values.shape[0], values.shape[1]), scheme, values)

    def _packed(self, module: str, tensors: Mapping[str, StoredTensor], packed: StoredTensor) -> CompressedMatrix:
        stored = check_shape(f"{module}.weight_shape", tensors.get(f"{module}.weight_shape"), (2,), "integers")
        if stored.open().min() < 1:
            raise unreadable(f"{module}.weight_shape", "two whole numbers above 0", stored)
        outputs, inputs = (int(each) for each in stored.open())
        key = f"{module}.weight_packed"
        check_kind(key, packed, "words")
        scale = tensors[f"{module}.weight_scale"]
        scheme = self._scheme(key, inputs, scale, lambda each: packed.shape == (outputs, -(-inputs * each.bits // 32)))
        return self._integers(module, tensors, (outputs, inputs), scheme, packed)

    def _integers(
        self,
        module: str,
        tensors: Mapping[str, StoredTensor],
        shape: tuple[int, int],
        scheme: _Scheme,
        values: StoredTensor,
    ) -> CompressedMatrix:
        outputs, inputs = shape
        scale, zeros = tensors[f"{module}.weight_scale"], tensors.get(f"{module}.weight_zero_point")
        groups = scheme.groups(inputs)
        if zeros is None and not scheme.symmetric:
            raise unreadable(f"{module}.weight_zero_point", "one, as symmetric of quantization_config says", None)
        if groups > 1 or scale.shape not in ((), (1,), (1, 1), (outputs,)):
            check_shape(f"{module}.weight_scale", scale, (outputs, groups))
        check_kind(f"{module}.weight_scale", scale)
        if zeros is not None and zeros.dtype == np.int32 and values.dtype == np.int32:
            check_shape(f"{module}.weight_zero_point", zeros, (-(-outputs * scheme.bits // 32), groups), "words")
        elif zeros is not None:
            check_shape(f"{module}.weight_zero_point", zeros, scale.shape, "integers")
        order = np.arange(inputs) // (scheme.group or inputs)
        neighbours = groups == 1 or inputs % (scheme.group or inputs) == 0
        if (stored := tensors.get(f"{module}.weight_g_idx")) is not None:
            given = check_groups(f"{module}.weight_g_idx", stored, inputs, groups)
            neighbours &= bool(np.array_equal(given, order))
            order = given
        kept = None if neighbours else order
        return CompressedMatrix(values.file, shape, scheme.bits, values, scale, zeros, kept)

    def _scheme(self, key: str, inputs: int, scale: StoredTensor, fits: Callable[[_Scheme], bool]) -> _Scheme:
        """The one scheme that fits what is stored."""
        found = [scheme for scheme in self.schemes if fits(scheme)]
        if len(found) > 1:
            found = [scheme for scheme in found if scale.shape[1:] == (scheme.groups(inputs),)]
        if len(found) != 1:
            raise unreadable(key, "one of the groups of quantization_config", None, f"{len(found)} that fit it")
        return found[0]
