"""Quantized matrices of a checkpoint, dequantized when they are read, and checks of their parts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from edgekv.errors import CheckpointError
from exporters.checkpoint.stored import ComputedTensor, StoredTensor
from quant import WeightDtype

PartKind = Literal["floats", "words", "integers"]

_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Storage:
    """What a bundle can make of a quantized matrix without another type.

    Attributes:
        dtype: the integer type that is closest to what is stored.
        obstacle: why the integers cannot be carried over into it; empty if they can.
    """

    dtype: WeightDtype
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class CarryCost:
    """What carrying integers over into LPBQ changes.

    Attributes:
        changed: number of integers that differ.
        error: sum of squared differences of the weights; 0 if nothing changed.
        energy: sum of the squared weights; 0 for a type without blocks, which changes nothing.
    """

    changed: int
    error: float
    energy: float


class QuantizedMatrix(ComputedTensor):
    """A matrix that is stored with fewer bits than a float."""

    __slots__ = ()

    @abstractmethod
    def storage(self) -> Storage:
        """What a bundle can make of it."""


def check_shape(
    key: str, tensor: StoredTensor | None, shape: tuple[int, ...], kind: PartKind = "floats"
) -> StoredTensor:
    """The part of a quantized matrix.

    Raises:
        CheckpointError: it is missing, or has another shape or type.
    """
    if tensor is None or tensor.shape != shape:
        expected = f"shape {list(shape)}, as quantization_config and the other parts of the matrix say"
        raise unreadable(key, expected, tensor)
    return check_kind(key, tensor, kind)


def check_kind(key: str, tensor: StoredTensor, kind: PartKind = "floats") -> StoredTensor:
    """The part of a quantized matrix, of any shape.

    Raises:
        CheckpointError: it has another type: integers where scales belong mean something else.
    """
    name = tensor.dtype.name
    is_right = {
        "floats": name in _FLOATS,
        "words": name == "int32",
        "integers": tensor.dtype.kind in "iu",
    }
    if not is_right[kind]:
        raise unreadable(key, {"words": "int32", "integers": "integers"}.get(kind, " or ".join(_FLOATS)), tensor)
    return tensor


def unreadable(key: str, expected: str, tensor: StoredTensor | None, got: str = "no such tensor") -> CheckpointError:
    """The error that refuses a part of a quantized matrix."""
    return CheckpointError(
        f"weights: {key}",
        got=got if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}",
        expected=expected,
        fix="The file is damaged, or config.json belongs to another one; fetch both again.",
    )
