"""A file of constants that several graphs share."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_ALIGNMENT_BYTES = 4096  # pages: the runtime maps the file


class WeightFile:
    """Constants written one after the other; a graph refers to their places in the file.

    Attributes:
        location: the file's name in the references.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        """Args: file: to write to. location: its name in the end."""
        self.location = location
        self._file = file
        self._length_bytes = 0

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """A constant with this content."""
        tensor = self.tensor(name, array, ir.DataType.from_numpy(array.dtype))
        return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)

    def tensor(self, name: str, array: NDArray[Any], dtype: ir.DataType) -> ir.ExternalTensor:
        """A reference to this content; types of 4 bits are packed in pairs, the first one low."""
        content = np.ascontiguousarray(array)
        if dtype.bitwidth == 4:
            nibbles = content.astype(np.int8).view(np.uint8).reshape(-1) & 15
            content = nibbles[0::2] | np.append(nibbles[1::2], [0] * (nibbles.size % 2)).astype(np.uint8) << 4
        self._write(b"\0" * (-self._length_bytes % _ALIGNMENT_BYTES))
        offset = self._length_bytes
        self._write(content.tobytes())
        return ir.ExternalTensor(self.location, offset, content.nbytes, dtype, shape=ir.Shape(array.shape), name=name)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._length_bytes += len(content)
