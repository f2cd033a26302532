"""The smallest graphs that make a runtime construct a session."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_WIDTH = 64
_ZERO_POINT = 32768


def write_onnx_sum(path: Path) -> None:
    """An ONNX graph of one integer operation, x + x, as exported graphs have them."""
    import onnx
    from onnx import TensorProto, helper

    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [2.0**-15]),
        helper.make_tensor("zero", TensorProto.UINT16, [], [_ZERO_POINT]),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["real"]),
        helper.make_node("Add", ["real", "real"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "scale", "zero"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.UINT16, [1, _WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "sum", [x], [y], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def onnx_sum_case() -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """An input of that graph, and the output that it must have."""
    x = np.arange(_ZERO_POINT, _ZERO_POINT + _WIDTH, dtype=np.uint16)[None]
    return x, (2 * (x - _ZERO_POINT) + _ZERO_POINT).astype(np.uint16)


def tflite_model() -> bytes:
    """A TFLite model of one subgraph without operators (schema version 3).

    Written by hand, for no package that writes FlatBuffers comes with tflite-runtime. Every offset counts from
    where it stands; a table points back at the list of its fields.
    """
    root, model_fields, model, nothing, subgraphs, subgraph_fields, subgraph, end = 0, 8, 24, 44, 52, 60, 76, 96
    parts = [
        (root, struct.pack("<I4s", model - root, b"TFL3")),
        # version, operator_codes, subgraphs, no description, buffers
        (model_fields, struct.pack("<7H", 14, 20, 4, 8, 12, 0, 16)),
        (model, struct.pack("<iI", model - model_fields, 3)),
        (model + 8, struct.pack("<3I", nothing - (model + 8), subgraphs - (model + 12), nothing - (model + 16))),
        (nothing, struct.pack("<I", 0)),
        (subgraphs, struct.pack("<2I", 1, subgraph - (subgraphs + 4))),
        # tensors, inputs, outputs, operators: all empty
        (subgraph_fields, struct.pack("<6H", 12, 20, 4, 8, 12, 16)),
        (subgraph, struct.pack("<i4I", subgraph - subgraph_fields, *(end - (subgraph + at) for at in (4, 8, 12, 16)))),
        (end, struct.pack("<I", 0)),
    ]
    raw = bytearray(end + 4)
    for at, part in parts:
        raw[at : at + len(part)] = part
    return bytes(raw)
