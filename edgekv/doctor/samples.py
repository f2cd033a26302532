"""The smallest graphs that show whether a runtime works."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

OPSET, IR_VERSION = 23, 11
"""Versions of the exported graphs: an older onnxruntime loads neither."""

_WIDTH = 64
_ZERO_POINT = 32768


def write_onnx_norm(path: Path) -> None:
    """An ONNX graph of one RMS norm between uint16 activations, as exported graphs have them."""
    import onnx
    from onnx import TensorProto, helper

    weights = [(each + 1) / 128 for each in range(_WIDTH)]
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [2.0**-15]),
        helper.make_tensor("zero", TensorProto.UINT16, [], [_ZERO_POINT]),
        helper.make_tensor("weights", TensorProto.UINT16, [_WIDTH], [round(each * 2**15) for each in weights]),
        helper.make_tensor("none", TensorProto.UINT16, [], [0]),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["real"]),
        helper.make_node("DequantizeLinear", ["weights", "scale", "none"], ["real_weights"]),
        helper.make_node("RMSNormalization", ["real", "real_weights"], ["norm"], axis=-1, epsilon=1e-6),
        helper.make_node("QuantizeLinear", ["norm", "scale", "zero"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.UINT16, [1, _WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "norm", [x], [y], constants)
    opset = helper.make_opsetid("", OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION), path)


def onnx_norm_case() -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """An input of that graph, [1, 64], and its output: +-0.5 has the RMS 0.5, so that +-1 times the weights remains."""
    signs = np.where(np.arange(_WIDTH) % 2, -1, 1)
    x = _ZERO_POINT + 2**14 * signs
    y = _ZERO_POINT + 2**8 * (np.arange(_WIDTH) + 1) * signs
    return x[None].astype(np.uint16), y[None].astype(np.uint16)


def tflite_model() -> bytes:
    """A TFLite model of one subgraph without operators (schema version 3).

    Written by hand, because tflite-runtime does not depend on a package that writes FlatBuffers. Every offset is
    relative to its own position; a table points back to the list of its fields.
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
