"""A `.tflite` file under construction: subgraphs over one pool of constant buffers.

The format is TensorFlow Lite's schema, version 3; the classes generated from it come with LiteRT's package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from quant import Encoding

ElementType = Literal["u8", "s4", "s8", "s16", "i32", "f32"]

_VERSION = 3
_IDENTIFIER = b"TFL3"
_LARGEST_OLD_CODE = 127  # the field for old readers is a byte
_ELEMENTS: dict[str, int] = {
    "u8": schema.TensorType.UINT8,
    "s4": schema.TensorType.INT4,
    "s8": schema.TensorType.INT8,
    "s16": schema.TensorType.INT16,
    "i32": schema.TensorType.INT32,
    "f32": schema.TensorType.FLOAT32,
}
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a subgraph.

    Attributes:
        index: its number in the subgraph.
        shape: all dimensions.
        encoding: encoding of its integers; None for floats and plain integers.
    """

    index: int
    shape: tuple[int, ...]
    encoding: Encoding | None = None


class TfliteFile:
    """The whole file. Buffers are shared by all subgraphs: a weight is stored once."""

    def __init__(self) -> None:
        self._buffers = [schema.BufferT()]  # buffer 0 is the empty one, of all tensors that are computed
        self._pool: dict[str, int] = {}
        self._codes: dict[int, int] = {}
        self._subgraphs: list[Subgraph] = []

    def subgraph(self, name: str) -> Subgraph:
        """A new subgraph, which the runtimes know by this name."""
        made = Subgraph(self, name)
        self._subgraphs.append(made)
        return made

    def buffer(self, key: str, make: Callable[[], NDArray[Any]]) -> int:
        """The number of the buffer under this key; `make` returns its content on first use."""
        if key not in self._pool:
            data = np.ascontiguousarray(make()).reshape(-1).view(np.uint8)
            self._pool[key] = len(self._buffers)
            self._buffers.append(schema.BufferT(data=data))
        return self._pool[key]

    def code(self, operator: str) -> int:
        """The number of an operator's code, by its name in the schema."""
        return self._codes.setdefault(getattr(schema.BuiltinOperator, operator), len(self._codes))

    def save(self, path: Path) -> None:
        """Write the file."""
        model = schema.ModelT(
            version=_VERSION,
            description="edgekv",
            operatorCodes=[
                schema.OperatorCodeT(deprecatedBuiltinCode=min(code, _LARGEST_OLD_CODE), builtinCode=code, version=1)
                for code in self._codes
            ],
            subgraphs=[subgraph.finished() for subgraph in self._subgraphs],
            buffers=self._buffers,
            signatureDefs=[subgraph.signature(index) for index, subgraph in enumerate(self._subgraphs)],
        )
        builder = flatbuffers.Builder(sum(len(b.data) for b in self._buffers if b.data is not None) + (1 << 20))
        builder.Finish(model.Pack(builder), _IDENTIFIER)
        path.write_bytes(builder.Output())


class Subgraph:
    """One graph of the file, under construction."""

    def __init__(self, file: TfliteFile, name: str) -> None:
        self._file = file
        self.name = name
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._constants: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    def input(self, name: str, element: ElementType, shape: Sequence[int], encoding: Encoding | None = None) -> Tensor:
        """A new input."""
        self._inputs[name] = self._tensor(name, element, shape, encoding)
        return self._inputs[name]

    def output(self, name: str, tensor: Tensor) -> None:
        """Make a tensor an output; its name becomes the output's."""
        self._tensors[tensor.index].name = name
        self._outputs[name] = tensor

    def constant(
        self,
        key: str,
        element: ElementType,
        shape: Sequence[int],
        make: Callable[[], NDArray[Any]],
        *,
        encoding: Encoding | None = None,
        scales: NDArray[np.float32] | None = None,
    ) -> Tensor:
        """The constant under this key; `scales` are for symmetric integers, one for each index of the first axis.

        `make` packs two integers of 4 bits in a byte; see `quant.pack_int4`.
        """
        if key not in self._constants:
            made = self._tensor(key, element, shape, encoding)
            stored = self._tensors[made.index]
            stored.buffer = self._file.buffer(key, make)
            if scales is not None:
                zeros = np.zeros(len(scales), np.int64)
                stored.quantization = schema.QuantizationParametersT(scale=scales, zeroPoint=zeros)
            self._constants[key] = made
        return self._constants[key]

    def operate(
        self,
        operator: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        kind: str | None = None,
        options: Mapping[str, object] = _NO_OPTIONS,
    ) -> None:
        """Append an operator with the options of a table of the schema; None is an omitted input."""
        made = schema.OperatorT(
            opcodeIndex=self._file.code(operator),
            inputs=[-1 if tensor is None else tensor.index for tensor in inputs],
            outputs=[tensor.index for tensor in outputs],
        )
        if kind is not None:
            made.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
            made.builtinOptions = getattr(schema, kind + "T")(**options)
        self._operators.append(made)

    def result(self, name: str, element: ElementType, shape: Sequence[int], encoding: Encoding | None = None) -> Tensor:
        """A new tensor for an operator to write."""
        return self._tensor(name, element, shape, encoding)

    def finished(self) -> Any:
        """The schema's object."""
        return schema.SubGraphT(
            name=self.name,
            tensors=self._tensors,
            operators=self._operators,
            inputs=[tensor.index for tensor in self._inputs.values()],
            outputs=[tensor.index for tensor in self._outputs.values()],
        )

    def signature(self, index: int) -> Any:
        """The names of inputs and outputs, for the subgraph at this index of the file."""
        return schema.SignatureDefT(
            signatureKey=self.name,
            subgraphIndex=index,
            inputs=[schema.TensorMapT(name=name, tensorIndex=tensor.index) for name, tensor in self._inputs.items()],
            outputs=[schema.TensorMapT(name=name, tensorIndex=tensor.index) for name, tensor in self._outputs.items()],
        )

    def _tensor(self, name: str, element: ElementType, shape: Sequence[int], encoding: Encoding | None) -> Tensor:
        made = schema.TensorT(name=name, type=_ELEMENTS[element], shape=np.array(shape, np.int32), buffer=0)
        if encoding is not None:
            made.quantization = schema.QuantizationParametersT(
                scale=np.array([encoding.scale], np.float32), zeroPoint=np.array([encoding.zero_point], np.int64)
            )
        self._tensors.append(made)
        return Tensor(len(self._tensors) - 1, tuple(shape), encoding)
